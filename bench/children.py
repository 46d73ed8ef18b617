"""The parent's side of an engine's process: start it, ask it, read its log when it fails.

Owns processes and pipes; knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOG_TAIL_BYTES = 2000
STOP_PATIENCE_S = 20.0


class ChildError(RuntimeError):
    """An engine that did not start, or died, or said that a run went wrong."""


class Child:
    """One engine's process. Its log is ``log_file``."""

    def __init__(self, environment: Mapping[str, str], log_file: Path) -> None:
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))))
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.engine_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, **environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, command: str, **fields: Any) -> None:
        """Send a command whose answer ``hear`` returns. Raises ``ChildError`` when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **fields}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildError(self._obituary("has ended")) from error

    def hear(self, limit_s: float) -> dict[str, Any]:
        """The next answer. Raises ``ChildError`` when there is none within ``limit_s``, or when it is an error."""
        try:
            line = self._lines.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            raise ChildError(self._obituary(f"did not answer within {limit_s:.0f} s")) from None
        if line is None:
            raise ChildError(self._obituary("has ended"))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def ask(self, command: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        self.tell(command, **fields)
        return self.hear(limit_s)

    def finish(self) -> None:
        """Ask it to end: its input has."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it may have died already, and what was not sent is of no use
            self._process.stdin.close()

    def close(self) -> None:
        """End it, by force where asking does not do."""
        self.finish()
        try:
            self._process.wait(STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _obituary(self, what: str) -> str:
        tail = self.log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return f"the engine {what}; the end of {self.log_file}:\n{tail}"
