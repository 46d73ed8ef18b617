"""Appending to a ledger's files: the chain goes on across writers, restarts, rotation and crashes.

All writers of a ledger, whichever process they are in, append to one file, a batch at a time under a lock (``flock`` on
the head file): one chain and one order, where a file for each process would be as many chains, each of which ends
whenever a worker does. What a writer finds beyond the head's end it takes as written, whoever died there. Owns locking,
the head, rotation and retention; not the queue before it (``ledger.py``), nor the hash (``chain.py``).
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from guard.telemetry.chain import GENESIS, HEAD_BYTES, Hash, Head, Secret, link_of, linked, read_head
from guard.telemetry.ledger_files import (
    first_entry_of,
    head_path,
    placed_backwards,
    rotated_files,
    rotated_path,
)
from guard.telemetry.locking import locked

log = logging.getLogger("guard.ledger")

MODE = 0o640
HEAD_MODE = 0o600
"""Who may open the head may lock it, and so stop every writer."""

LOCK_WAIT_S = 2.0
"""Others hold it for one write. One who holds it for longer is an error like a disk's."""

COPY_BYTES = 1 << 20
LINE_END = b"\n"


@dataclass(frozen=True)
class Keeping:
    """When a file is rotated out, and how long it stays then. ``files``: how many of these are kept, None for all."""

    max_bytes: int = 256 * 1024 * 1024
    max_age_s: float | None = None
    files: int | None = None
    age_s: float | None = None


class LedgerFile:
    """One writer. A path that is no regular file, such as a pipe or ``/dev/stdout``, gets a chain of its own for each
    writer, and is neither locked nor rotated."""

    def __init__(self, path: Path, secret: Secret | None = None, keeping: Keeping | None = None) -> None:
        self.path = path
        self._secret = secret
        self._keeping = keeping or Keeping()
        self._file: int | None = None
        self._lock: int | None = None
        self._sent = Head()
        self._torn: bytes | None = b""

    def open(self) -> None:
        """Create what is missing. Raises ``OSError``."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        if self._lock is None and self.is_file:
            self._lock = os.open(head_path(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, HEAD_MODE)
            state = os.fstat(self._lock)
            if stat.S_IMODE(state.st_mode) & ~HEAD_MODE and state.st_uid == os.geteuid():
                # Of an earlier version.
                os.fchmod(self._lock, HEAD_MODE)

    def close(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                try:
                    os.close(file)
                except OSError:
                    log.debug("closing the ledger failed")
        self._file = self._lock = None

    def append(self, entries: Sequence[bytes]) -> tuple[int, OSError | None]:
        """How many of these JSON objects are whole in the file, and why not all."""
        try:
            self.open()
            if self.is_file:
                with self._locked():
                    whole, error = self._append_to_file(self._rotated(self._found()), entries)
            else:
                whole, error = self._append_to_stream(entries)
        except OSError as cause:
            whole, error = 0, cause
        if error is not None:
            self.close()
        return whole, error

    def keep_house(self) -> None:
        """Rotate and delete what is due, when nothing is written for a long time too."""
        try:
            self.open()
            if self.is_file:
                with self._locked():
                    self._delete_old(self._rotated(self._found()))
        except OSError as error:
            self.close()
            log.error("ledger %s: old files could not be looked after: %s", self.path, error.strerror)

    @property
    def is_file(self) -> bool:
        """Whether it is a file, and no pipe or device. It must be open."""
        return stat.S_ISREG(os.fstat(self._fd).st_mode)

    @property
    def _fd(self) -> int:
        assert self._file is not None, "the ledger is not open"
        return self._file

    @property
    def _head_fd(self) -> int:
        assert self._lock is not None, "the ledger is not open"
        return self._lock

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with locked(self._head_fd, head_path(self.path), LOCK_WAIT_S):
            self._follow()
            yield

    def _follow(self) -> None:
        """Another writer may have rotated the file, or somebody moved it."""
        try:
            moved = not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            moved = True
        if moved:
            os.close(self._fd)
            self._file = None
            self.open()

    def _found(self) -> Head:
        """The chain's end as it is now."""
        head = read_head(os.pread(self._head_fd, HEAD_BYTES, 0), self._secret)
        state = os.fstat(self._fd)
        if head is not None and head.file == state.st_ino and head.end <= state.st_size:
            return head if head.end == state.st_size else self._caught_up(head)
        end, n, hash_ = self._last_entry(self._fd)
        first = self._first_entry() if end else None
        if head is not None:
            # The file is another one, or cut off: numbers go on from the head, so that what is gone stays missing.
            last = (n, hash_) if n > head.n else (head.n, head.hash)
            head = replace(head, n=last[0], hash=last[1], end=end, file=state.st_ino, first=first or last[0] + 1)
        else:
            older = rotated_files(self.path)
            if not n and older:
                n, hash_ = self._last_of(older[-1])
            first = first or n + 1
            oldest = first_entry_of(self.path, older[0]) if older else first
            # Without any entry there was no chain before this one, and nothing that could be lost.
            head = Head(n, hash_, end, state.st_ino, first, time.time(), oldest, lost=n > 0)
            if head.lost:
                log.warning("ledger %s: its head is gone, or has another key; the next entry says so", self.path)
        # Before any entry: on a disk that is full now, one would be in the file without a head.
        os.pwrite(self._head_fd, head.to_bytes(self._secret), 0)
        return head

    def _caught_up(self, head: Head) -> Head:
        """With what another writer appended before it died: whole entries count, what else is there does not."""
        with open(os.dup(self._fd), "rb") as file:
            at = file.seek(head.end)
            for i, line in enumerate(file):
                at += len(line)
                if not i and line == LINE_END:
                    # Of the last entry, if it had none.
                    head = replace(head, end=at) if not self._ended(head.end) else head
                elif (link := link_of(line.removesuffix(LINE_END))) is not None and link.n == head.n + 1:
                    # Another number is no writer's; taken over, it would have numbers come twice, or end.
                    head = replace(head, n=link.n, hash=link.hash, end=at)
        return head

    def _ended(self, end: int) -> bool:
        """Whether the entry before this place has its line end."""
        return not end or os.pread(self._fd, 1, end - 1) == LINE_END

    def _last_entry(self, file: int) -> tuple[int, int, str]:
        """Of a file: where the last entry ends, its number and hash; those of nothing when there is none."""
        with open(os.dup(file), "rb") as lines:
            for at, line in placed_backwards(lines):
                if (link := link_of(line)) is not None:
                    return min(at + len(line) + 1, os.fstat(file).st_size), link.n, link.hash
        return 0, 0, GENESIS

    def _last_of(self, path: Path) -> tuple[int, str]:
        with path.open("rb") as file:
            return self._last_entry(file.fileno())[1:]

    def _first_entry(self) -> int | None:
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            links = (link_of(line.removesuffix(LINE_END)) for line in file)
            return next((link.n for link in links if link is not None), None)

    def _append_to_file(self, head: Head, entries: Sequence[bytes]) -> tuple[int, OSError | None]:
        size = os.fstat(self._fd).st_size
        if head.n + 1 == head.first:
            head = replace(head, since=time.time())
        hash_ = Hash(head.hash, self._secret)
        if head.end == size:
            between = b"" if self._ended(size) else LINE_END
        else:
            # After half a line of a crash or a full disk: the next entry begins on its own, and vouches for it.
            between = b"" if self._feed(hash_, head.end, size) == LINE_END else LINE_END
            hash_.update(between)
        data, heads = self._lines(head, entries, hash_, size, between)
        sent, error = _write(self._fd, data)
        whole = _whole(heads, size + sent)
        if whole:
            self._write_head(whole[-1])
        return len(whole), error

    def _append_to_stream(self, entries: Sequence[bytes]) -> tuple[int, OSError | None]:
        """As to a file; ``_torn`` is what stands behind the last entry."""
        head, torn = self._sent, self._torn
        hash_ = Hash(head.hash, self._secret)
        between = LINE_END if torn is None or (torn and not torn.endswith(LINE_END)) else b""
        if torn:
            hash_.update(torn + between)
        data, heads = self._lines(head, entries, hash_, 0, between)
        sent, error = _write(self._fd, data)
        whole = _whole(heads, sent)
        if whole:
            self._sent = whole[-1]
            self._torn = data[whole[-1].end : sent] if data[: whole[-1].end].endswith(LINE_END) else None
        else:
            # A line end that the entry before lacked is no part of what stands behind it.
            self._torn = torn + data[:sent] if torn is not None else data[1:sent] if sent else None
        return len(whole), error

    def _lines(
        self, head: Head, entries: Sequence[bytes], hash_: Hash, at: int, between: bytes
    ) -> tuple[bytes, list[Head]]:
        """What to write at ``at``, and the head after each entry. ``between``: what comes before the first."""
        parts, heads = [between], []
        at += len(between)
        for entry in entries:
            line, head = linked(entry, head, hash_, self._secret)
            at += len(line) + len(LINE_END)
            head = replace(head, end=at)
            parts += [line, LINE_END]
            heads.append(head)
            hash_ = Hash(head.hash, self._secret)
        return b"".join(parts), heads

    def _feed(self, hash_: Hash, start: int, end: int) -> bytes:
        """Bytes [start, end) of the file into a hash; the last of them comes back, or nothing."""
        last = b""
        while start < end and (data := os.pread(self._fd, min(COPY_BYTES, end - start), start)):
            hash_.update(data)
            start, last = start + len(data), data[-1:]
        return last

    def _write_head(self, head: Head) -> None:
        """A head that cannot be written is behind, and whoever comes next catches up."""
        try:
            os.pwrite(self._head_fd, head.to_bytes(self._secret), 0)
        except OSError as error:
            log.error("ledger %s: its head could not be written: %s", self.path, error.strerror)

    def _rotated(self, head: Head) -> Head:
        """The head, of a new file when this one is full or old. One that ends in half a line waits for an entry."""
        limits, size = self._keeping, os.fstat(self._fd).st_size
        old = limits.max_age_s is not None and time.time() - head.since >= limits.max_age_s
        if head.n < head.first or head.end != size or not (size >= limits.max_bytes or old):
            return head
        target = rotated_path(self.path, head.first)
        if target.exists():
            log.error("ledger %s: not rotated: %s is there already", self.path, target.name)
            return head
        os.rename(self.path, target)
        self._follow()
        head = replace(head, end=0, file=os.fstat(self._fd).st_ino, first=head.n + 1, since=time.time())
        self._write_head(head)
        return self._delete_old(head)

    def _delete_old(self, head: Head) -> Head:
        """Without what retention does not keep: only ever the beginning of the chain. The head first, so that a
        deletion that is cut short is no gap."""
        limits, now_s = self._keeping, time.time()
        files = rotated_files(self.path)
        surplus = len(files) - limits.files if limits.files is not None else 0
        gone = 0
        while gone < len(files) and (
            gone < surplus or (limits.age_s is not None and now_s - files[gone].stat().st_mtime >= limits.age_s)
        ):
            gone += 1
        if gone:
            head = replace(head, oldest=first_entry_of(self.path, files[gone]) if gone < len(files) else head.first)
            self._write_head(head)
            for file in files[:gone]:
                file.unlink(missing_ok=True)
        return head


def _whole(heads: Sequence[Head], end: int) -> list[Head]:
    """Those of entries that are in a file of this length, if only without a line end."""
    return [replace(one, end=min(one.end, end)) for one in heads if one.end - len(LINE_END) <= end]


def _write(file: int, data: bytes) -> tuple[int, OSError | None]:
    """How many bytes went, and why not all."""
    sent = 0
    try:
        while sent < len(data):
            sent += os.write(file, data[sent:])
    except OSError as error:
        return sent, error
    return sent, None
