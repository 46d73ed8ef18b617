"""The ledger: entries are queued by the event loop and appended by a thread.

Owns the queue and the thread; the files are ``ledger_file.py``'s. A disk that fails is counted and logged, and never
costs a request.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from guard.telemetry.chain import Secret
from guard.telemetry.ledger_file import Keeping, LedgerFile

log = logging.getLogger("guard.ledger")

Result = Literal["written", "delayed", "failed", "dropped"]
"""``delayed``: the disk refused an entry at first; it is kept and tried again. ``failed``: it still refused when the
ledger was closed. ``dropped``: too many waited."""

MAX_QUEUED = 100_000
RETRY_S = 1.0
MAX_BATCH = 512
LOG_EVERY_S = 60.0

HOUSEKEEPING_S = 600.0
"""How often old files are looked after, whether anything is written or not."""

GATHER_S = 0.02
"""One write for what comes within this time. While this thread runs, no answer goes on."""


class LedgerError(RuntimeError):
    """A ledger that cannot be opened at start."""


class Ledger:
    """Append-only JSON lines. ``on_result(result, entries)`` is called from both threads for every entry."""

    def __init__(
        self,
        path: Path,
        on_result: Callable[[Result, int], None] = lambda result, entries: None,
        *,
        secret: Secret | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        self.path = path
        self._on_result = on_result
        self._queue: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._file = LedgerFile(path, secret, keeping)
        self._closing = threading.Event()
        self._logged_s = float("-inf")

    def __enter__(self) -> Self:
        _first_open(self._file)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Write what is queued, then close. What the disk refuses now is lost, and counted."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Queue one entry; never blocks, never raises."""
        line = json.dumps(entry, separators=(",", ":")).encode()
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._report("dropped", 1, f"{MAX_QUEUED} entries wait to be written")

    def _run(self) -> None:
        self._file.keep_house()
        house_s = time.monotonic()
        while True:
            lines, ends = self._batch()
            if lines:
                self._write(lines)
            if ends:
                return
            if time.monotonic() - house_s >= HOUSEKEEPING_S:
                self._file.keep_house()
                house_s = time.monotonic()

    def _batch(self) -> tuple[list[bytes], bool]:
        """Wait for one line, a little for others, then take what is there; none when there was none for long. True:
        nothing comes after these."""
        lines: list[bytes] = []
        try:
            line = self._queue.get(timeout=HOUSEKEEPING_S)
        except queue.Empty:
            return lines, False
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
        whole, error = self._file.append(lines)
        if whole:
            self._on_result("written", whole)
        return lines[whole:], (error.strerror or "an error") if error is not None else ""

    def _report(self, result: Result, entries: int, why: str) -> None:
        self._on_result(result, entries)
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log.error("ledger %s: %d entries %s: %s (said at most once a minute)", self.path, entries, result, why)


def check_writable(path: Path) -> None:
    """Raises ``LedgerError`` when the ledger cannot be opened; makes file and folder if need be."""
    file = LedgerFile(path)
    _first_open(file)
    file.close()


def _first_open(file: LedgerFile) -> None:
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.open()
    except OSError as error:
        raise LedgerError(
            f"the ledger {file.path} cannot be written: {error.strerror}; choose another file with --ledger"
        ) from None
