"""Whether a ledger's chain holds: for each file, line by line, what was removed, changed, moved or put there.

Owns how findings are told. What an unbroken chain proves, and what not, is in docs/ledger.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from guard.telemetry.chain import GENESIS, HEAD_BYTES, Hash, Head, Link, Secret, hashed_part, link_of, read_head
from guard.telemetry.content_check import Vouched, differences, vouched_by
from guard.telemetry.ledger_files import content_folder, head_path, open_all
from guard.telemetry.ledger_reader import LedgerReadError
from guard.telemetry.locking import locked

COPY_BYTES = 1 << 20
NOT_WRITTEN = (
    "no entry of the chain, and no half line either, which is all that a crash leaves: somebody put it there, or a "
    "version without a chain wrote it"
)
LOCK_WAIT_S = 10.0


@dataclass(frozen=True)
class Anchor:
    """An entry's number and hash, noted earlier and kept where nobody who can write the ledger can change it."""

    n: int
    hash: str

    def __str__(self) -> str:
        return f"{self.n}:{self.hash}"


@dataclass(frozen=True)
class Finding:
    """Something about one line. ``line``: counted from 1; 0 for a file as a whole. ``entry``: the number in the chain
    of the entry that it is about, or of the next one."""

    file: str
    line: int
    entry: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"


@dataclass
class Checked:
    """``problems``: what should not be. ``notes``: what a crash, a full disk or an earlier version left. ``last``: the
    chain's end, to be noted as an anchor; None for no entry."""

    files: int = 0
    lines: int = 0
    entries: int = 0
    first: int = 0
    last: Anchor | None = None
    keyed: int = 0
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "holds": not self.problems,
            "files": self.files,
            "lines": self.lines,
            "entries": self.entries,
            "keyed": self.keyed,
            "first": self.first,
            "last": None if self.last is None else str(self.last),
            "problems": [asdict(one) for one in self.problems],
            "notes": [asdict(one) for one in self.notes],
        }

    def summary(self) -> str:
        """One line for people."""
        kept = f"{self.entries} entries in {self.files} files, {self.keyed} of them keyed"
        if self.problems:
            return f"the chain does not hold: {len(self.problems)} problems; {kept}"
        return f"the chain holds: {kept}; the last is {self.last or 'none'}"


def check(
    path: Path,
    secret: Secret | None = None,
    since: int = 1,
    anchors: Sequence[Anchor] = (),
    *,
    content: bool = False,
) -> Checked:
    """Read every file of a ledger. ``secret``: what entries must be keyed with. ``since``: problems with entries before
    this number are not told. ``content``: read the captured text too. A ledger may be written to meanwhile.

    Raises ``LedgerReadError``, for an entry that is keyed where no secret is given too.
    """
    run = _Run(secret, {one.n: one for one in anchors}, content=content)
    try:
        with _as_it_is_now(path) as (files, head):
            for i, (name, file, end) in enumerate(files, 1):
                run.file(name, file, end, newest=i == len(files))
            run.end(path, head, read_head(head, secret))
        run.content(content_folder(path))
    except OSError as error:
        raise LedgerReadError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    run.found.problems = [one for one in run.found.problems if one.entry >= since]
    return run.found


@contextmanager
def _as_it_is_now(path: Path) -> Iterator[tuple[list[tuple[str, BinaryIO, int]], bytes]]:
    """Every file with its name and length, and the head, from between two entries."""
    with ExitStack() as open_files:
        head = b""
        with ExitStack() as lock:
            try:
                head_file = open_files.enter_context(head_path(path).open("rb"))
            except FileNotFoundError:
                opened = open_all(path)
            else:
                lock.enter_context(locked(head_file.fileno(), head_path(path), LOCK_WAIT_S, "shared"))
                head = os.pread(head_file.fileno(), HEAD_BYTES, 0)
                try:
                    opened = open_all(path)
                except FileNotFoundError:
                    # The head says what is missing.
                    opened = []
            for _, lines in opened:
                open_files.enter_context(lines)
            files = [(file.name, lines, os.fstat(lines.fileno()).st_size) for file, lines in opened]
        yield files, head


@dataclass
class _Between:
    """Lines between two entries that are none: ``first`` to ``last``, bytes [start, end) of their file. ``half``: the
    last one has no line end. ``whole``: one of them is no half line that a crash or a full disk leaves."""

    first: int = 0
    last: int = 0
    start: int = 0
    end: int = 0
    half: bool = False
    whole: bool = False

    def add(self, number: int, at: int, line: bytes) -> None:
        if not self.last:
            self.first, self.start = number, at
        self.last, self.end, self.half = number, at + len(line), not line.endswith(b"\n")
        self.whole |= _is_whole(line)

    @property
    def where(self) -> str:
        return f"line {self.first}" if self.first == self.last else f"lines {self.first} to {self.last}"


class _Run:
    """The check on its way through the files."""

    def __init__(self, secret: Secret | None, anchors: dict[int, Anchor], *, content: bool) -> None:
        self.found = Checked()
        self._secret = secret
        self._anchors = anchors
        self._n = 0
        self._hash: str | None = None
        self._name = ""
        self._lines: BinaryIO
        self._between = _Between()
        self._reads_content = content
        self._other_keys: dict[tuple[str, str], tuple[int, Finding]] = {}
        self._vouched: list[Vouched] = []

    def file(self, name: str, lines: BinaryIO, end: int, *, newest: bool) -> None:
        self._name, self._lines, self._between = name, lines, _Between()
        self.found.files += 1
        at = 0
        for number, line in enumerate(lines, 1):
            if at >= end:
                break
            self.found.lines += 1
            link = link_of(line.removesuffix(b"\n"))
            if link is None:
                self._between.add(number, at, line)
            else:
                self._entry(number, line.removesuffix(b"\n"), link)
                self._between = _Between()
            at += len(line)
        if self._between.last:
            self._left_over(newest=newest)

    def end(self, path: Path, raw: bytes, head: Head | None) -> None:
        """What the head file says there should be."""
        self._tell_other_keys()
        found, name = self.found, head_path(path).name
        self._name = self._name or path.name
        for anchor in self._anchors.values():
            self._problem(0, f"has no entry {anchor.n}, which was noted", anchor.n)
        if not raw.strip():
            if found.entries:
                self._named_problem(name, "is gone: entries cut off at the ledger's end would not show", self._n)
            return
        if head is None:
            what = "was not written with this secret" if self._secret else "is damaged, or was written with a secret"
            self._named_problem(name, f"{what}: entries cut off at the ledger's end would not show", self._n)
            return
        if head.n > self._n:
            gone = _entries(self._n + 1 if found.entries else head.oldest, head.n)
            self._problem(0, f"{gone} missing at the end: the head file says that there were {head.n}", head.n)
        elif head.n == self._n and head.hash != self._hash and found.entries:
            self._problem(0, f"ends otherwise than the head file says: entry {head.n} has another hash", head.n)
        elif head.n < self._n:
            self._note(0, f"{_entries(head.n + 1, self._n)} not in the head file: a writer ended in between")
        if found.entries and found.first > head.oldest:
            gone = _entries(head.oldest, found.first - 1)
            self._named_problem(
                name, f"{gone} missing at the beginning, which retention has not deleted", found.first - 1
            )

    def content(self, folder: Path) -> None:
        """Text that somebody deleted is none of the chain's business, but is told."""
        for one, difference in differences(folder, self._vouched, datetime.now(UTC).date()):
            what = f"the captured text of request {one.request_id!r} (entry {one.entry})"
            if difference == "changed":
                what += " is not what was written"
                self.found.problems.append(Finding(one.file, one.line, one.entry, what))
            else:
                what += f" is gone, before its last day, {one.expires}"
                self.found.notes.append(Finding(one.file, one.line, one.entry, what))

    def _entry(self, number: int, line: bytes, link: Link) -> None:
        found, expected = self.found, self._n + 1
        checkable = self._check_secret(number, link)
        before = self._before(number, link)
        if link.n < expected and found.entries:
            self._problem(number, f"entry {link.n} is not in its place: it comes after entry {self._n}", link.n)
            self._unplaced(link.n)
            return
        if link.n > expected and found.entries:
            gone = _entries(expected, link.n - 1)
            self._problem(number, f"{gone} missing before this line", link.n - 1)
            before = link.prev
        if before is None:
            # Nothing to check it against but what comes after.
            self._unplaced(link.n)
        elif checkable:
            self._check_hash(number, line, link, before)
        if link.head_lost:
            self._problem(
                number,
                f"entry {link.n}: the head file was gone by then; entries cut off before it do not show",
                link.n - 1,
            )
        if (anchor := self._anchors.pop(link.n, None)) is not None and anchor.hash != link.hash:
            self._problem(number, f"entry {link.n} has another hash than was noted", link.n)
        if self._reads_content and (vouched := vouched_by(self._name, number, link.n, line)) is not None:
            self._vouched.append(vouched)
        found.first = found.first or link.n
        found.entries += 1
        found.keyed += link.key is not None
        self._n, self._hash = link.n, link.hash
        found.last = Anchor(link.n, link.hash)

    def _before(self, number: int, link: Link) -> str | None:
        """The hash of the entry before; None where it is not known."""
        if not self.found.entries:
            if link.n == 1:
                return GENESIS
            if link.prev is None:
                self._problem(
                    number, f"entry {link.n} is the first: what was before it in this file is gone", link.n - 1
                )
            return link.prev
        return self._hash

    def _check_secret(self, number: int, link: Link) -> bool:
        """Whether its hash can be checked."""
        if self._secret is None:
            if link.key is not None:
                raise LedgerReadError(f"{self._name}:{number}: is keyed; the secret is needed to check it")
        elif link.key is None:
            self._problem(number, f"entry {link.n} is not keyed", link.n)
        elif link.key != self._secret.name:
            count, at = self._other_keys.get((self._name, link.key), (0, Finding(self._name, number, link.n, "")))
            self._other_keys[self._name, link.key] = (count + 1, replace(at, entry=link.n))
        return self._secret is None or link.key in (None, self._secret.name)

    def _tell_other_keys(self) -> None:
        """Once for each file and key: with a wrong one it is about every entry."""
        for (_, key), (count, at) in self._other_keys.items():
            entries = f"entry {at.entry} is" if count == 1 else f"{count} entries, up to {at.entry}, are"
            what = f"{entries} keyed with another secret ({key}), and cannot be checked with this one"
            self.found.problems.append(replace(at, what=what))

    def _check_hash(self, number: int, line: bytes, link: Link, before: str) -> None:
        secret = self._secret if link.key is not None else None
        between = self._between
        if self._sum(between, line, before, secret) == link.hash:
            # Before the first entry of all stand those of a version without a chain.
            if between.whole and link.n > 1:
                self._problem(between.first, f"{between.where}: {NOT_WRITTEN}", link.n)
            elif between.last:
                self._note(
                    between.first,
                    f"{between.where}: no entry, vouched for by the next: of a crash, a full disk or an older version",
                )
        elif between.last and self._sum(_Between(), line, before, secret) == link.hash:
            self._unplaced(link.n)
        else:
            self._problem(
                number, f"entry {link.n} is not what was written, or what is before it: its hash does not fit", link.n
            )
        if link.prev is not None and link.prev != before:
            self._problem(number, f"entry {link.n} names another hash before it than there is", link.n)

    def _sum(self, between: _Between, line: bytes, before: str, secret: Secret | None) -> str:
        sum_ = Hash(before, secret)
        at = between.start
        while at < between.end and (data := os.pread(self._lines.fileno(), min(COPY_BYTES, between.end - at), at)):
            sum_.update(data)
            at += len(data)
        sum_.update(hashed_part(line))
        return sum_.hex()

    def _unplaced(self, entry: int) -> None:
        if self._between.last:
            self._problem(self._between.first, f"{self._between.where}: no entry, and nothing vouches for it", entry)

    def _left_over(self, *, newest: bool) -> None:
        """After a file's last entry."""
        between = self._between
        if newest and between.half and between.first == between.last and not between.whole:
            self._note(between.first, "half a line at the end: of a crash or a full disk, or somebody's")
        else:
            self._unplaced(self._n + 1)

    def _problem(self, line: int, what: str, entry: int) -> None:
        self.found.problems.append(Finding(self._name, line, entry, what))

    def _named_problem(self, name: str, what: str, entry: int) -> None:
        self.found.problems.append(Finding(name, 0, entry, what))

    def _note(self, line: int, what: str) -> None:
        self.found.notes.append(Finding(self._name, line, self._n, what))


def _is_whole(line: bytes) -> bool:
    """Whether readers may take it for an entry, or it is nothing that an entry begins with."""
    begun = line.strip()
    if not begun:
        return False
    try:
        json.loads(line)
    except RecursionError:
        return True
    except ValueError:
        return not begun.startswith(b"{")
    return True


def _entries(first: int, last: int) -> str:
    return f"entry {first} is" if first == last else f"entries {first} to {last} are"
