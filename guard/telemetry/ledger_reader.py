"""Reading a ledger: its latest entries, one request's, and the text that was captured of it.

The one place that knows how entries lie in files, for the console, ``guard ledger``, replay and calibration: rotated
files are read too, the newest entry first where that is quicker. Never writes. What is not an entry, such as half a
line after a crash, is passed over; ``ledger_check.py`` is what looks at it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, BinaryIO

from guard.telemetry.chain import link_of
from guard.telemetry.content import Captured, find_captured
from guard.telemetry.ledger_files import (
    BLOCK_BYTES,
    content_folder,
    ledger_files,
    lines_backwards,
    lines_forwards,
    lines_with,
    open_all,
)

Entry = dict[str, Any]
"""One request, by the fields of ``guard.telemetry.record.ENTRY_FIELDS`` and ``chain``."""


CUT_ID = re.compile(r"[0-9a-f]{6,31}")
"""What may be the beginning of a request's own id."""

MOST_OF_CLIENTS = 1000
"""Requests that are told by an id which clients sent: anybody may send one any number of times."""

UNCHAINED = "this line is not in the chain: somebody put it there, or a version of the guard without a chain wrote it"
OF_CLIENT = "client_request_id"
"""The field that an entry was found by when its own id is another one."""


class LedgerReadError(ValueError):
    """A ledger that cannot be read, or lacks what was asked for."""


def entries(path: Path) -> Iterator[Entry | None]:
    """Every line, the oldest first; None for one that is no entry, or has no place in the chain: only writers add to
    what is counted. Lines of a version without a chain stand before the chain's beginning. Whether a place is invented
    only ``ledger_check`` can say. Raises ``LedgerReadError``."""
    began = first_number(path) > 1
    try:
        for line in lines_forwards(path):
            chained_ = link_of(line.removesuffix(b"\n")) is not None
            began = began or chained_
            yield parsed(line) if chained_ or not began else None
    except OSError as error:
        raise _unreadable(path, error) from None


def first_number(path: Path) -> int:
    """Of the first entry in the chain that is still there; 0 when there is none. Raises ``LedgerReadError``."""
    try:
        links = (link_of(line.removesuffix(b"\n")) for line in lines_forwards(path))
        return next((link.n for link in links if link is not None), 0)
    except OSError as error:
        raise _unreadable(path, error) from None


def newest_first(path: Path) -> Iterator[Entry]:
    """Every entry, the newest first. Raises ``LedgerReadError``."""
    try:
        for line in lines_backwards(path):
            entry = parsed(line)
            if entry is not None:
                yield entry
    except OSError as error:
        raise _unreadable(path, error) from None


def recent(path: Path, count: int) -> list[Entry]:
    """The latest ``count`` entries, the newest first. Reads no more of the files than these take.

    Raises ``LedgerReadError``.
    """
    found: list[Entry] = []
    for entry in newest_first(path):
        if len(found) >= count:
            break
        found.append(entry)
    return found


@dataclass(frozen=True)
class Found:
    """What has an id. ``own``: the request that the guard gave it to. ``of_clients``: the latest of those whose client
    sent it as its own, the newest first; a client may send any id, another request's too."""

    own: Entry | None
    of_clients: tuple[Entry, ...]


def find(path: Path, request_id: str) -> Entry | None:
    """The latest entry of a request, by its own id only. Raises ``LedgerReadError``."""
    return find_all(path, request_id, most=0).own


def find_all(path: Path, request_id: str, most: int = MOST_OF_CLIENTS) -> Found:
    """By its own id, and by the client's, of which at most ``most`` come. One that is in the chain goes before one
    that is not, which somebody may have put there.

    Raises ``LedgerReadError``.
    """
    of_clients: list[Entry] = []
    own: Entry | None = None
    for entry in _with_text(path, json.dumps(request_id).encode()):
        if entry["request_id"] == request_id:
            if own is None or (chained(entry) and not chained(own)):
                own = entry
        elif entry.get("client_request_id") == request_id and len(of_clients) < most:
            of_clients.append(entry)
        if len(of_clients) >= most and own is not None and chained(own):
            break
    return Found(own, tuple(of_clients))


def cut(request_id: str) -> str:
    """What to add to a message that there is no such request, where the id may be the beginning of one."""
    return "; ids are given whole: 32 digits" if CUT_ID.fullmatch(request_id) else ""


def _with_text(path: Path, text: bytes) -> Iterator[Entry]:
    """Entries whose line has it, the newest first. Raises ``LedgerReadError``."""
    try:
        opened = open_all(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        for _, file in reversed(opened):
            for line in lines_with(file, text):
                entry = parsed(line)
                if entry is not None:
                    yield entry
    except OSError as error:
        raise _unreadable(path, error) from None
    finally:
        for _, file in opened:
            file.close()


def captured(path: Path, request_id: str) -> Captured | None:
    """The text that was kept of a request, by its own id only. None when its policy allowed none, or its retention is
    over.

    Raises ``LedgerReadError``.
    """
    entry = find(path, request_id)
    return None if entry is None else captured_of(path, entry)


def captured_of(path: Path, entry: Entry) -> Captured | None:
    """As ``captured``, of an entry that was read before. Raises ``LedgerReadError``."""
    kept = entry.get("captured")
    if not isinstance(kept, dict):
        return None
    try:
        expires, sha256 = date.fromisoformat(str(kept["expires"])), str(kept["sha256"])
    except (LookupError, ValueError):
        return None
    try:
        return find_captured(content_folder(path), str(entry["request_id"]), expires, sha256)
    except OSError as error:
        raise _unreadable(content_folder(path), error) from None


def follow(path: Path, count: int, every_s: float = 0.2) -> Iterator[Entry]:
    """The latest ``count`` entries, the oldest first, and then for ever those that come, across rotation.

    Raises ``LedgerReadError``.
    """
    try:
        file = path.open("rb")
        # Opened first: what comes meanwhile may be read twice, and is told once.
        file.seek(0, os.SEEK_END)
        shown = 0
        for entry in reversed(recent(path, count)):
            shown = max(shown, _number(entry))
            yield entry
        rest = b""
        while True:
            # Asked before reading: what was written to a file that is rotated by now is all there.
            newer = _after(path, file)
            while data := file.read(BLOCK_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    later = parsed(line)
                    if later is not None and not 0 < _number(later) <= shown:
                        yield later
            if newer is None:
                time.sleep(every_s)
                continue
            file.close()
            file, rest = newer.open("rb"), b""
    except OSError as error:
        raise _unreadable(path, error) from None


def chained(entry: Entry) -> bool:
    """Whether it ends in a place in the chain. Whether that is its own only ``ledger_check.py`` can say."""
    last = next(reversed(entry), None)
    return last == "chain" and link_of(json.dumps({last: entry[last]}, separators=(",", ":")).encode()) is not None


def _number(entry: Entry) -> int:
    """In the chain; 0 for an entry of an older version."""
    chain = entry.get("chain")
    n = chain.get("n") if isinstance(chain, dict) else None
    return n if isinstance(n, int) else 0


def _after(path: Path, file: BinaryIO) -> Path | None:
    """The ledger's file after an open one; None while that is the last."""
    files = ledger_files(path)
    for at, one in enumerate(files):
        if os.path.samestat(one.stat(), os.fstat(file.fileno())):
            return files[at + 1] if at + 1 < len(files) else None
    # It is deleted, so all that are left are later ones.
    return files[0]


def parsed(line: bytes) -> Entry | None:
    """A line as an entry; None for what is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and "request_id" in entry else None


def _unreadable(path: Path, error: OSError) -> LedgerReadError:
    return LedgerReadError(f"{path}: cannot be read: {error.strerror}")
