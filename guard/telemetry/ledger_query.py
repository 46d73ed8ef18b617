"""Entries of a ledger that fit what somebody asks for, the newest first.

Owns what can be asked. Reads the files themselves: a line that cannot fit is passed over by its bytes, before it is
parsed, and a file whose last line is older than what is asked for is not opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from guard.telemetry.ledger_files import lines_with, open_all, placed_backwards
from guard.telemetry.ledger_reader import Entry, LedgerReadError, parsed

FIELDS = ("action", "policy", "assignment", "outcome", "route", "key", "tenant", "model", "error_code")
"""Fields of an entry that can be asked for by their value."""


@dataclass(frozen=True)
class Query:
    """``values``: of ``FIELDS``; ``rule``: one that hit, whether it was enforced or in shadow; ``scores``: detector to
    the least score; ``since`` and ``until``: when the request came."""

    values: Mapping[str, str] = field(default_factory=dict)
    rule: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None

    def fits(self, entry: Entry) -> bool:
        if any(entry.get(name) != value for name, value in self.values.items()):
            return False
        if self.rule is not None and self.rule not in _rules(entry):
            return False
        if any(not _reaches(entry, name, least) for name, least in self.scores.items()):
            return False
        if self.since is None and self.until is None:
            return True
        came = time_of(entry)
        return came is not None and (self.since or came) <= came <= (self.until or came)

    @property
    def bytes_needed(self) -> list[bytes]:
        """What is somewhere in every line that fits, the longest first, which is likely the rarest."""
        texts = [*self.values.values(), *([self.rule] if self.rule is not None else []), *self.scores]
        return sorted((json.dumps(text).encode() for text in texts), key=len, reverse=True)


def matching(path: Path, query: Query) -> Iterator[Entry]:
    """Raises ``LedgerReadError``."""
    needed = query.bytes_needed
    try:
        opened = open_all(path)
    except OSError as error:
        raise LedgerReadError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        for name, file in reversed(opened):
            if query.since is not None and name.stat().st_mtime < query.since.timestamp():
                return
            lines = lines_with(file, needed[0]) if needed else (line for _, line in placed_backwards(file))
            for line in lines:
                if all(one in line for one in needed) and (entry := parsed(line)) is not None and query.fits(entry):
                    yield entry
    except OSError as error:
        raise LedgerReadError(f"{path}: cannot be read: {error.strerror}") from None
    finally:
        for _, file in opened:
            file.close()


def detectors_in(path: Path) -> set[str]:
    """Names of all detectors that gave a request a score. Raises ``LedgerReadError``."""
    names: set[str] = set()
    for entry in matching(path, Query()):
        answer = entry.get("answer")
        for part in (entry, answer if isinstance(answer, dict) else {}):
            scores = part.get("scores")
            names.update(scores if isinstance(scores, dict) else ())
    return names


def time_of(entry: Entry) -> datetime | None:
    """When a request came; None where the entry does not say so."""
    try:
        came = datetime.fromisoformat(str(entry.get("time")))
    except ValueError:
        return None
    return came if came.tzinfo else came.replace(tzinfo=UTC)


def _rules(entry: Entry) -> set[str]:
    hits = entry.get("hits")
    named = {str(hit.get("rule")) for hit in hits if isinstance(hit, dict)} if isinstance(hits, list) else set()
    rules = entry.get("rules")
    return named | (set(map(str, rules)) if isinstance(rules, list) else set())


def _reaches(entry: Entry, detector: str, least: float) -> bool:
    """By the score of the prompt, or any that the answer had."""
    answer = entry.get("answer")
    answer = answer if isinstance(answer, dict) else {}
    earlier = answer.get("earlier")
    for part in (entry, answer, *(earlier if isinstance(earlier, list) else ())):
        for field_name in ("scores", "over_time"):
            scores = part.get(field_name)
            score = scores.get(detector) if isinstance(scores, dict) else None
            score = score.get("highest") if isinstance(score, dict) else score
            if isinstance(score, int | float) and score >= least:
                return True
    return False
