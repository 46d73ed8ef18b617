"""Reading a ledger: its latest entries, one request's, and the text that was captured of it.

The one place that knows how entries lie in files, for the console, ``guard ledger``, replay and calibration: rotated
files are read too, the newest entry first where that is quicker. Never writes. What is not an entry, such as half a
line after a crash, is passed over; ``ledger_check.py`` is what looks at it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from guard.telemetry.content import Captured, find_captured
from guard.telemetry.ledger_files import content_folder, ledger_files, lines_backwards, lines_forwards

Entry = dict[str, Any]
"""One request, by the fields of ``guard.telemetry.record.ENTRY_FIELDS`` and ``chain``."""


class LedgerReadError(ValueError):
    """A ledger that cannot be read, or lacks what was asked for."""


def entries(path: Path) -> Iterator[Entry | None]:
    """Every line, the oldest first; None for one that is no entry. Raises ``LedgerReadError``."""
    try:
        for line in lines_forwards(path):
            yield parsed(line)
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


def find(path: Path, request_id: str) -> Entry | None:
    """The latest entry of a request; clients may use an id twice. Raises ``LedgerReadError``."""
    wanted = json.dumps(request_id).encode()
    try:
        for line in lines_backwards(path):
            if wanted in line and (entry := parsed(line)) is not None and entry.get("request_id") == request_id:
                return entry
    except OSError as error:
        raise _unreadable(path, error) from None
    return None


def captured(path: Path, request_id: str) -> Captured | None:
    """The text that was kept of a request. None when its policy allowed none, or its retention is over.

    Raises ``LedgerReadError``.
    """
    entry = find(path, request_id)
    kept = entry.get("captured") if entry is not None else None
    if not isinstance(kept, dict):
        return None
    try:
        expires, sha256 = date.fromisoformat(str(kept["expires"])), str(kept["sha256"])
    except (LookupError, ValueError):
        return None
    try:
        return find_captured(content_folder(path), request_id, expires, sha256)
    except OSError as error:
        raise _unreadable(content_folder(path), error) from None


def check_readable(path: Path) -> None:
    """Raises ``LedgerReadError`` when there is no ledger."""
    try:
        ledger_files(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def parsed(line: bytes) -> Entry | None:
    """A line as an entry; None for what is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and "request_id" in entry else None


def _unreadable(path: Path, error: OSError) -> LedgerReadError:
    return LedgerReadError(f"{path}: cannot be read: {error.strerror}")
