"""The ledger's file: entries are queued by the event loop and appended by a thread.

Owns the queue, the thread and the file. A disk that fails is counted and logged, and never costs a request.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

log = logging.getLogger("guard.ledger")

Result = Literal["written", "delayed", "failed", "dropped"]
"""``delayed``: the disk refused an entry at first; it is kept and tried again. ``failed``: it still refused when the
ledger was closed. ``dropped``: too many waited."""

MAX_QUEUED = 100_000
RETRY_S = 1.0
MAX_BATCH = 512
LOG_EVERY_S = 60.0
LINE_END = ord("\n")

GATHER_S = 0.02
"""One write for what comes within this time. While this thread runs, no answer goes on."""


class LedgerError(RuntimeError):
    """A ledger that cannot be opened at start."""


class Ledger:
    """Append-only JSON lines. ``on_result(result, entries)`` is called from both threads for every entry."""

    def __init__(self, path: Path, on_result: Callable[[Result, int], None] = lambda result, entries: None) -> None:
        self.path = path
        self._on_result = on_result
        self._queue: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._file: int | None = None
        self._torn = False
        self._closing = threading.Event()
        self._logged_s = float("-inf")

    def __enter__(self) -> Self:
        self._file = _first_open(self.path)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Write what is queued, then close. What the disk refuses now is lost, and counted."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def append(self, entry: Mapping[str, Any]) -> None:
        """Queue one entry; never blocks, never raises."""
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._report("dropped", 1, f"{MAX_QUEUED} entries wait to be written")

    def _run(self) -> None:
        while True:
            lines, ends = self._batch()
            if lines:
                self._write(lines)
            if ends:
                return

    def _batch(self) -> tuple[list[bytes], bool]:
        """Wait for one line, a little for others, then take what is there. True: nothing comes after these."""
        lines: list[bytes] = []
        line = self._queue.get()
        if line is not None:
            time.sleep(GATHER_S)
        while line is not None:
            lines.append(line)
            if len(lines) == MAX_BATCH:
                return lines, False
            try:
                line = self._queue.get_nowait()
            except queue.Empty:
                return lines, False
        return lines, True

    def _write(self, lines: list[bytes]) -> None:
        """Until they are all in the file; once the ledger is being closed, at most once more."""
        delayed = False
        while True:
            last = self._closing.is_set()
            lines, why = self._try(lines)
            if not lines:
                return
            if last:
                return self._report("failed", len(lines), why)
            if not delayed:
                self._report("delayed", len(lines), why)
            delayed = True
            self._closing.wait(RETRY_S)

    def _try(self, lines: list[bytes]) -> tuple[list[bytes], str]:
        """Those that are not whole in the file, and why."""
        # After half a line, the next entry begins on a line of its own.
        data = (b"\n" if self._torn else b"") + b"".join(lines)
        sent, why = 0, ""
        try:
            if self._file is None:
                self._file = _open(self.path)
            while sent < len(data):
                sent += os.write(self._file, data[sent:])
        except OSError as error:
            self._close_quietly()
            why = error.strerror or "an error"
        self._torn = data[sent - 1] != LINE_END if sent else self._torn
        sent -= len(data) - sum(map(len, lines))
        whole = 0
        while whole < len(lines) and sent >= len(lines[whole]):
            sent -= len(lines[whole])
            whole += 1
        if whole:
            self._on_result("written", whole)
        return lines[whole:], why

    def _close_quietly(self) -> None:
        if self._file is not None:
            try:
                os.close(self._file)
            except OSError:
                log.debug("closing the ledger failed too")
            self._file = None

    def _report(self, result: Result, entries: int, why: str) -> None:
        self._on_result(result, entries)
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log.error("ledger %s: %d entries %s: %s (said at most once a minute)", self.path, entries, result, why)


def check_writable(path: Path) -> None:
    """Raises ``LedgerError`` when the ledger cannot be opened; makes file and folder if need be."""
    os.close(_first_open(path))


def _first_open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _open(path)
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be written: {error.strerror}; choose another file with --ledger"
        ) from None


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
