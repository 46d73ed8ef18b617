"""Whether captured text is what the ledger's entries vouch for. Owns the comparison; what an entry says is read by
``ledger_check.py``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

from guard.telemetry.content import digest, file_of

Difference = Literal["changed", "gone"]


@dataclass(frozen=True)
class Vouched:
    """What an entry says of the text that was kept of its request, and where that entry is."""

    file: str
    line: int
    entry: int
    request_id: str
    expires: date
    sha256: str


def vouched_by(file: str, number: int, entry: int, line: bytes) -> Vouched | None:
    """Of one line of the ledger; None when it speaks of no text."""
    if b'"captured":{' not in line:
        return None
    try:
        fields = json.loads(line)
        captured = fields["captured"]
        expires = date.fromisoformat(captured["expires"])
        return Vouched(file, number, entry, str(fields["request_id"]), expires, str(captured["sha256"]))
    except (ValueError, LookupError, TypeError):
        return None


def differences(folder: Path, vouched: Iterable[Vouched], today: date) -> Iterable[tuple[Vouched, Difference]]:
    """Texts whose time is not over that are not there as they were written. Raises ``OSError``."""
    days: dict[date, list[Vouched]] = {}
    for one in vouched:
        if one.expires >= today:
            days.setdefault(one.expires, []).append(one)
    for day, ones in sorted(days.items()):
        digests, requests = _kept(file_of(folder, day))
        for one in ones:
            if one.sha256 not in digests:
                yield one, "changed" if one.request_id in requests else "gone"


def _kept(file: Path) -> tuple[set[str], set[str]]:
    """Digests of a file's lines, and the requests that they say they are of."""
    digests, requests = set(), set()
    try:
        with file.open("rb") as lines:
            for line in lines:
                digests.add(digest(line))
                # The first field, so that it is found in a line that is damaged further on.
                start, _, rest = line.partition(b'"request_id":"')
                if start == b"{":
                    requests.add(rest.partition(b'"')[0].decode(errors="replace"))
    except FileNotFoundError:
        pass
    return digests, requests
