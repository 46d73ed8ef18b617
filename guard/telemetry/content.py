"""Captured text: one line of JSON for each request whose policy allows it, in a folder beside the ledger.

A line lies in the file of the last day on which it is kept, so that retention is deleting files. The ledger's entry has
the SHA-256 of the line, and the line has a random salt: while the text is there an edit of it shows, and once it is
deleted nobody can find it out from the ledger by guessing. Owns the line's form, the folder and its retention; what is
captured, and what is taken out before, is decided elsewhere (``guard/proxy/capturing.py``, ``redaction.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from guard.telemetry.locking import locked

SALT_BYTES = 16
LOCK_WAIT_S = 0.5
"""The ledger's entries wait meanwhile."""


@dataclass(frozen=True)
class PromptText:
    """What a message of a request says, its texts a line each. ``message``: its index, negative for one text that is in
    none, such as a tool's definition. ``role``: of that message; empty for none."""

    message: int
    role: str
    text: str


@dataclass(frozen=True)
class AnswerText:
    """One text of an answer. ``channel``: what of the choice it is: words, reasoning, a tool call's arguments, as the
    API has them. ``withheld``: the client did not get it as it stands here: a rule blocked, redacted or replaced it."""

    choice: int
    channel: str
    text: str
    withheld: bool = False


@dataclass(frozen=True)
class Captured:
    """What was kept of one request. ``redactions``: how often something was taken out, by what it was.
    ``truncated``: it was longer than what is kept. ``intact``: whether it is what the ledger's entry vouches for.
    ``expires``: the last day on which it is kept, UTC."""

    request_id: str
    time: str
    policy: str
    prompt: tuple[PromptText, ...]
    answer: tuple[AnswerText, ...]
    redactions: Mapping[str, int]
    truncated: bool
    expires: date
    intact: bool = True

    def to_line(self) -> bytes:
        """As it is written, with its line end and a new salt."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "time": self.time,
            "policy": self.policy,
            "prompt": [asdict(one) for one in self.prompt],
            "answer": [asdict(one) for one in self.answer],
            "redactions": dict(self.redactions),
            "truncated": self.truncated,
            "salt": secrets.token_hex(SALT_BYTES),
        }
        # ASCII: halves of surrogate pairs, which JSON can spell, are no UTF-8.
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def digest(line: bytes) -> str:
    """What the ledger's entry says of a line."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def keep(folder: Path, captured: Captured) -> str:
    """Write the text of one request; its line's digest. Raises ``OSError``."""
    folder.mkdir(mode=0o700, exist_ok=True)
    line = captured.to_line()
    path = file_of(folder, captured.expires)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Other processes write there too.
        with locked(file, path, LOCK_WAIT_S):
            size = os.fstat(file).st_size
            data = line if not size or os.pread(file, 1, size - 1) == b"\n" else b"\n" + line
            while data:
                data = data[os.write(file, data) :]
    finally:
        os.close(file)
    return digest(line)


def delete_expired(folder: Path, today: date) -> int:
    """Delete the files whose last day is over; how many. Raises ``OSError``."""
    days = ((file, _day_of(file)) for file in folder.glob("????-??-??.jsonl"))
    over = [file for file, day in days if day is not None and day < today]
    for file in over:
        file.unlink(missing_ok=True)
    return len(over)


def file_of(folder: Path, expires: date) -> Path:
    return folder / f"{expires.isoformat()}.jsonl"


def find_captured(folder: Path, request_id: str, expires: date, sha256: str) -> Captured | None:
    """The text of one request; None when it is not there any more. ``sha256``: as the ledger's entry has it.

    Raises ``OSError``.
    """
    wanted = b'{"request_id":' + json.dumps(request_id).encode() + b","
    other: Captured | None = None
    try:
        with file_of(folder, expires).open("rb") as lines:
            for line in lines:
                if not line.startswith(wanted):
                    continue
                intact = digest(line) == sha256
                read = _read(line, expires, intact=intact)
                if read is not None and intact:
                    return read
                other = read or other
    except FileNotFoundError:
        return None
    return other


def _day_of(file: Path) -> date | None:
    try:
        return date.fromisoformat(file.stem)
    except ValueError:
        return None


def _read(line: bytes, expires: date, *, intact: bool) -> Captured | None:
    try:
        fields = json.loads(line)
        return Captured(
            request_id=str(fields["request_id"]),
            time=str(fields["time"]),
            policy=str(fields["policy"]),
            prompt=tuple(
                PromptText(int(one["message"]), str(one["role"]), str(one["text"])) for one in fields["prompt"]
            ),
            answer=_answers(fields["answer"]),
            redactions={str(name): int(count) for name, count in fields["redactions"].items()},
            truncated=bool(fields["truncated"]),
            expires=expires,
            intact=intact,
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _answers(given: Sequence[Mapping[str, Any]]) -> tuple[AnswerText, ...]:
    return tuple(
        AnswerText(int(one["choice"]), str(one["channel"]), str(one["text"]), bool(one["withheld"])) for one in given
    )
