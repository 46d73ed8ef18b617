"""Texts of requests that the console may show: what a policy lets the ledger keep, and the playground's own runs, which
an operator wrote.

Owns how many of the latter are kept, in memory, and the way from what was kept of a request to what its prompt was.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from guard.telemetry.content import AnswerText, Captured
from guard.telemetry.ledger import Ledger
from guard.telemetry.ledger_reader import LedgerReadError, captured
from guard.telemetry.recent import Finished

MAX_KEPT = 200
NOT_JUDGED = "its text is not kept: it did not come to a policy, which would say whether it may be"
NOT_ALLOWED = "its text is not kept: its policy does not allow it (capture)"
PROMPT_NOT_ALLOWED = "its prompt is not kept: its policy does not allow it (capture.prompt)"
NOT_THERE = "its text is not kept any more, or could not be: the log has an error then"
UNREADABLE = "its text cannot be read: the ledger cannot"
WORDS = "content"
"""The channel of a chat completion that is its words."""


@dataclass(frozen=True)
class Content:
    """``fields``: of the request's body, what its prompt is made from, as far as it is known. ``answer``: its text as
    far as there is one. ``changes``: in what this is not what the model read, in words; ``notes``: what else is
    to know."""

    fields: Mapping[str, Any]
    answer: str = ""
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_prompt(self) -> bool:
        return bool(self.fields.get("messages"))


@dataclass
class Contents:
    """``ledger``: which the texts lie beside, or wait in. By id of the request."""

    ledger: Ledger
    _kept: OrderedDict[str, Content] = field(default_factory=OrderedDict)

    def keep(self, request_id: str, content: Content) -> None:
        self._kept[request_id] = content
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    async def find(self, finished: Finished) -> Content | str:
        """Why there is none, in words, where the policy that judged the request lets nothing be kept, or it is not
        there any more."""
        if (kept := self._kept.get(finished.record.request_id)) is not None:
            return kept
        if finished.judges is None:
            return NOT_JUDGED
        if finished.judges.live.capture is None:
            return NOT_ALLOWED
        try:
            found = await asyncio.to_thread(self._captured, finished.record.request_id)
        except LedgerReadError:
            return UNREADABLE
        return NOT_THERE if found is None else from_captured(found, finished.record.model)

    def _captured(self, request_id: str) -> Captured | None:
        """Of a request that has just ended it is still on its way. Raises ``LedgerReadError``."""
        return self.ledger.waiting_text(request_id) or captured(self.ledger.path, request_id)


def from_captured(found: Captured, model: str | None) -> Content:
    """Messages put together again. What is no message, such as a tool's definition, is only told of."""
    parts: dict[int, list[str]] = {}
    roles = {}
    for one in found.prompt:
        if one.message >= 0:
            parts.setdefault(one.message, []).append(one.text)
            roles[one.message] = one.role
    messages = [{"role": roles[at], "content": "\n".join(texts)} for at, texts in sorted(parts.items())]
    answer = _shown(found)
    fields, text = {"model": model, "messages": messages}, answer.text if answer else ""
    return Content(fields, text, tuple(_changes(found)), tuple(_notes(found)))


def _shown(found: Captured) -> AnswerText | None:
    """Of several answers the first that the client got, or the first; None without words."""
    words = [one for one in found.answer if one.channel == WORDS]
    return min(words, key=lambda one: (one.withheld, one.choice), default=None)


def _changes(found: Captured) -> list[str]:
    out = ", ".join(f"{name} {count}" for name, count in found.redactions.items())
    changes = {
        f"taken out before it was kept: {out}": bool(out),
        "longer than what is kept": found.truncated,
        "with more than messages, such as tools": any(one.message < 0 for one in found.prompt),
        "not what the ledger vouches for: it was changed": not found.intact,
    }
    return [change for change, holds in changes.items() if holds]


def _notes(found: Captured) -> list[str]:
    shown, choices = _shown(found), len({one.choice for one in found.answer})
    notes = {
        "the client did not get this answer": shown is not None and shown.withheld,
        f"one of {choices} answers: that of choice {shown.choice if shown else 0}": shown is not None and choices > 1,
        f"kept until {found.expires.isoformat()}": True,
    }
    return [note for note, holds in notes.items() if holds]
