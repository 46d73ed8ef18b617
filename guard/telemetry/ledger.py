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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from guard.telemetry.chain import Secret, link_of
from guard.telemetry.content import Captured, delete_expired, keep
from guard.telemetry.ledger_file import Keeping, LedgerFile
from guard.telemetry.ledger_files import content_folder, head_path, ledger_files
from guard.telemetry.ledger_reader import parsed

log = logging.getLogger("guard.ledger")

Result = Literal["written", "delayed", "failed", "dropped"]
"""``delayed``: the disk refused an entry at first; it is kept and tried again. ``failed``: it still refused when the
ledger was closed. ``dropped``: too many waited."""

MAX_QUEUED = 100_000
RETRY_S = 1.0
MAX_BATCH = 512
MAX_CONTENT_BYTES = 64 * 1024 * 1024
"""Most memory for texts that wait to be written; what is more is not kept."""

LOG_EVERY_S = 60.0

HOUSEKEEPING_S = 600.0
"""How often old files are looked after, whether anything is written or not."""

HOUSEKEEPING_REFUSED_S = 30.0
"""The same while the disk refuses entries: what is due to go may be what it lacks the room of."""

LOOKED_AT_BYTES = 1 << 20
"""Of a file that is there before the first start."""

GATHER_S = 0.02
"""One write for what comes within this time. While this thread runs, no answer goes on."""


class LedgerError(RuntimeError):
    """A ledger that cannot be opened at start."""


class Content(Protocol):
    """The text of one request, still in memory."""

    @property
    def size_bytes(self) -> int: ...

    def captured(self) -> Captured:
        """What is to be kept of it; called by the ledger's thread, and by whoever looks at it before that."""
        ...


class Ledger:
    """Append-only JSON lines. ``on_result(result, entries)`` is called from both threads for every entry, and
    ``on_waiting`` with how many more of them wait, or fewer."""

    def __init__(
        self,
        path: Path,
        on_result: Callable[[Result, int], None] = lambda result, entries: None,
        on_waiting: Callable[[int], None] = lambda more: None,
        *,
        secret: Secret | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        self.path = path
        self._on_result = on_result
        self._on_waiting = on_waiting
        # Much cheaper to put into than a ``Queue``, which has a limit of its own.
        self._queue: queue.SimpleQueue[bytes | _WithContent | None] = queue.SimpleQueue()
        self._content = content_folder(path)
        self._content_bytes = 0
        self._content_lock = threading.Lock()
        self._texts: dict[str, _WithContent] = {}
        self._taken: list[_WithContent] = []
        self._keeps_texts = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._file = LedgerFile(path, secret, keeping)
        self._closing = threading.Event()
        self._logged_s = float("-inf")
        self._house_s = float("-inf")
        self._refused = threading.Lock()
        self._refusing = False
        self._delayed = 0
        self._failed = 0

    def __enter__(self) -> Self:
        _first_open(self._file)
        self._keeps_texts = self._file.is_file
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Write what is queued, then close. What the disk refuses now is lost, and counted."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._file.close()
        if self._failed:
            log.error(
                "ledger %s: %d entries are lost: it could not be written to until the end", self.path, self._failed
            )

    @property
    def delayed(self) -> int:
        """Entries that the disk refused, or that wait behind such: still kept, in memory."""
        return self._delayed

    def append(self, entry: Mapping[str, Any], content: Content | None = None) -> None:
        """Queue one entry; never blocks, never raises. ``content``: its text, if that may be kept; there
        is nowhere to keep it beside a ledger that is no file."""
        waiting: bytes | _WithContent
        if content is not None and self._keeps_texts and self._room_for(size_bytes := content.size_bytes):
            waiting = _WithContent(entry, content, size_bytes)
        else:
            waiting = _to_line(entry)
        if self._queue.qsize() < MAX_QUEUED:
            # Before the thread can have written it.
            self._on_waiting(1)
            if isinstance(waiting, _WithContent):
                self._texts[waiting.request_id] = waiting
            with self._refused:
                self._queue.put(waiting)
                if self._refusing:
                    self._delay(1, "they wait behind others that the disk refused")
        else:
            if isinstance(waiting, _WithContent):
                self._room_for(-waiting.size_bytes)
            self._report("dropped", 1, f"{MAX_QUEUED} entries wait to be written")

    def waiting_text(self, request_id: str) -> Captured | None:
        """The text of a request whose entry is not in the file yet, as it will be kept; None where none waits. Asked
        first: what does not wait is in the file by then."""
        waiting = self._texts.get(request_id)
        return None if waiting is None else waiting.content.captured()

    def _run(self) -> None:
        self._keep_house()
        while True:
            lines, ends = self._batch()
            if lines and not self._write(lines, ends=ends):
                return
            self._let_go()
            if ends:
                return
            self._keep_house_when_due(HOUSEKEEPING_S)

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
            if isinstance(line, _WithContent):
                self._taken.append(line)
                line = self._kept(line)
            lines.append(line)
            if len(lines) == MAX_BATCH:
                return lines, False
            try:
                line = self._queue.get_nowait()
            except queue.Empty:
                return lines, False
        return lines, True

    def _room_for(self, size_bytes: int) -> bool:
        """Take this much of the memory for texts that wait, or give it back."""
        with self._content_lock:
            if size_bytes > 0 and self._content_bytes + size_bytes > MAX_CONTENT_BYTES:
                log.error("a request's text is not kept: %d bytes of others wait already", self._content_bytes)
                return False
            self._content_bytes += size_bytes
            return True

    def _kept(self, one: _WithContent) -> bytes:
        """The entry's line, once its text is written; without it when that fails."""
        entry = dict(one.entry)
        try:
            captured = one.content.captured()
            sha256 = keep(self._content, captured)
            entry["captured"] = {"expires": captured.expires.isoformat(), "sha256": sha256}
        except Exception as error:
            # Whatever it is, it must not cost the entry; and its own words may quote the text.
            log.error("a request's text could not be kept in %s: %s", self._content, type(error).__name__)
        return _to_line(entry)

    def _let_go(self) -> None:
        """Of texts whose entries are in the file now."""
        for one in self._taken:
            self._texts.pop(one.request_id, None)
            self._room_for(-one.size_bytes)
        self._taken.clear()

    def _keep_house_when_due(self, every_s: float) -> None:
        if time.monotonic() - self._house_s >= every_s:
            self._keep_house()

    def _keep_house(self) -> None:
        self._house_s = time.monotonic()
        self._file.keep_house()
        try:
            delete_expired(self._content, datetime.now(UTC).date())
        except OSError as error:
            log.error("captured text in %s that is to be deleted is still there: %s", self._content, error.strerror)

    def _write(self, lines: list[bytes], *, ends: bool) -> bool:
        """Until they are all in the file. False: the ledger is being closed and they cannot be written; what comes
        after them is not tried. ``ends``: nothing does."""
        while True:
            last = self._closing.is_set()
            before = len(lines)
            lines, why = self._try(lines)
            with self._refused:
                self._delayed = max(0, self._delayed - (before - len(lines)))
                self._refusing = bool(lines)
                # Those that came meanwhile wait as well, and whatever comes from now on counts itself. Entries are
                # written in order: the first ones are told already.
                waiting = len(lines) + self._queue.qsize() - self._closing.is_set()
                if lines and not last and waiting > self._delayed:
                    self._delay(waiting - self._delayed, why)
            if not lines:
                return True
            if last:
                self._failed = len(lines) + (0 if ends else self._rest())
                self._on_result("failed", self._failed)
                self._on_waiting(-self._failed)
                return False
            self._keep_house_when_due(HOUSEKEEPING_REFUSED_S)
            self._closing.wait(RETRY_S)

    def _rest(self) -> int:
        """How many entries wait, up to the end; they are taken."""
        return sum(1 for _ in iter(self._queue.get, None))

    def _try(self, lines: list[bytes]) -> tuple[list[bytes], str]:
        """Those that are not whole in the file, and why."""
        whole, error = self._file.append(lines)
        if whole:
            self._on_result("written", whole)
            self._on_waiting(-whole)
        return lines[whole:], (error.strerror or "an error") if error is not None else ""

    def _delay(self, entries: int, why: str) -> None:
        self._delayed += entries
        self._report("delayed", entries, why)

    def _report(self, result: Result, entries: int, why: str) -> None:
        self._on_result(result, entries)
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log.error("ledger %s: %d entries %s: %s (said at most once a minute)", self.path, entries, result, why)


@dataclass(frozen=True)
class _WithContent:
    """An entry that waits until its text is written."""

    entry: Mapping[str, Any]
    content: Content
    size_bytes: int

    @property
    def request_id(self) -> str:
        return str(self.entry["request_id"])


def _to_line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode()


def check_writable(path: Path) -> None:
    """Raises ``LedgerError`` when the ledger cannot be opened, or what has its name is none; makes file and folder if
    need be."""
    _check_what_is_there(path)
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


def _check_what_is_there(path: Path) -> None:
    """Of a first start, which finds no head: another program's file would be appended to, renamed when it is large, and
    deleted when it is old. With a head the chain itself says what is not its own."""
    try:
        head = head_path(path)
        if head.exists() and head.stat().st_size:
            return
        for file in ledger_files(path):
            if file.is_file():
                _need_entries(file)
    except OSError:
        return  # nothing is there; or opening it says what is wrong


def _need_entries(file: Path) -> None:
    with file.open("rb") as opened:
        lines = [line for line in opened.read(LOOKED_AT_BYTES).splitlines() if line.strip()]
    if not lines or any(link_of(line) is not None for line in lines):
        return
    if not any(parsed(line) is not None for line in lines):
        raise LedgerError(
            f"{file} is there already, and is no ledger: it begins with lines that are no entries; "
            "move it away, or choose another file with --ledger"
        )
    log.warning(
        "ledger %s: it begins with entries that are in no chain: of a version without one, or somebody put them there; "
        "statistics and replay count them",
        file,
    )
