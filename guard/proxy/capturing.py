"""The texts of one request, for a policy that lets them be kept: what came, what went, and what was withheld.

Owns what of an exchange is text, and how much of it is kept. While the request is under way it only holds on to what
passes; everything else is done by the ledger's thread, afterwards. Nothing of it is ever logged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from typing import Any, TypeVar

from guard.policy import Judges
from guard.policy.capture import Capture
from guard.proxy.body import GuardedRequest
from guard.proxy.error_frame import error_frame
from guard.proxy.errors import UpstreamError
from guard.proxy.judging import WHOLE, Unit, channel_of, unit_of
from guard.proxy.wire import TOKENS, Form, Piece, Texts, frames_of
from guard.telemetry.content import AnswerText, Captured, PromptText
from guard.telemetry.record import RequestRecord
from guard.telemetry.redaction import redaction

T = TypeVar("T")

MAX_ANSWER_BYTES = 1 << 20
"""Of an answer as it is sent, with everything around its texts."""

MAX_CHARACTERS = 1 << 18
"""Of all texts of a prompt, and of all of an answer, each with its role or channel."""

MAX_LABEL_CHARACTERS = 128
"""Of a role, which is what a client writes, and of a channel, which names fields that a model server thought of."""

BEYOND = 4096
"""Characters that are looked at behind the last one that is kept: what is taken out may begin before."""


@dataclass
class Capturing:
    """``sent``: bytes of the answer that the client got; ``withheld``: texts of answers that it did not."""

    capture: Capture
    request: GuardedRequest[Texts]
    record: RequestRecord
    sent: bytearray = field(default_factory=bytearray)
    withheld: list[Mapping[Unit, str]] = field(default_factory=list)
    truncated: bool = False

    def went(self, data: bytes) -> None:
        """Part of the answer, on its way to the client."""
        if self.capture.answer:
            room = MAX_ANSWER_BYTES - len(self.sent)
            self.truncated |= len(data) > room
            self.sent += data[:room]

    def withhold(self, texts: Mapping[Unit, str]) -> None:
        """An answer that a rule keeps from the client, as it was judged."""
        if self.capture.answer:
            self.withheld.append(dict(texts))

    @property
    def size_bytes(self) -> int:
        """About how much memory this takes until it is written."""
        said = 0
        if self.capture.prompt:
            said = sum(len(text) for _, _, text in self.request.texts) + sum(map(len, self.request.roles))
        return said + len(self.sent) + sum(len(text) for texts in self.withheld for text in texts.values())

    def captured(self) -> Captured:
        """For the ledger's thread, once the request has ended."""
        record, capture = self.record, self.capture
        counted: Counter[str] = Counter()
        said = list(self._kept(self._said(), counted)) if capture.prompt else []
        answered = list(self._kept(self._answers(), counted)) if capture.answer else []
        return Captured(
            request_id=record.request_id,
            time=record.started_at.isoformat(timespec="milliseconds"),
            policy=record.policy,
            prompt=tuple(PromptText(message, role, text) for message, role, text in said),
            answer=tuple(AnswerText(choice, channel, text, withheld) for (choice, withheld), channel, text in answered),
            redactions=dict(counted),
            truncated=self.truncated,
            expires=record.started_at.astimezone(UTC).date() + timedelta(days=capture.retention_days),
        )

    def _kept(self, texts: Iterable[tuple[T, str, str]], counted: Counter[str]) -> Iterator[tuple[T, str, str]]:
        """Texts, each with where it is and its label, without what is to be taken out, as far as there is room."""
        redact = redaction(self.capture.redact, self.capture.patterns)
        room = MAX_CHARACTERS

        def cut(text: str, most: int) -> str:
            shown = redact(text[: most + BEYOND], counted)
            self.truncated |= len(text) > most + BEYOND or len(shown) > most
            return shown[:most]

        for where, label, text in texts:
            label_kept = cut(label, MAX_LABEL_CHARACTERS)
            room -= len(label_kept)
            if room <= 0:
                self.truncated = True
                return
            text_kept = cut(text, room)
            room -= len(text_kept)
            yield where, label_kept, text_kept

    def _said(self) -> Iterator[tuple[int, str, str]]:
        """Texts by message, with its role. Those of one message of a conversation are one, a line each, as a template
        shows them: what is to be taken out may begin in one part and end in the next."""
        roles, parts, alone = self.request.roles, dict[int, list[str]](), list[tuple[int, str]]()
        talks = isinstance(self.request.form, Form)
        for message, _, text in self.request.said:
            if talks and message >= 0:
                parts.setdefault(message, []).append(text)
            else:
                alone.append((message, text))
        joined = [(message, "\n".join(texts)) for message, texts in sorted(parts.items())]
        for message, text in (*joined, *alone):
            yield message, roles[message] if 0 <= message < len(roles) else "", text

    def _answers(self) -> Iterator[tuple[tuple[int, bool], str, str]]:
        """Texts by choice, and whether they were withheld, each with its channel."""
        for (choice, channel), text in self._delivered().items():
            yield (choice, False), channel, text
        for texts in self.withheld:
            for (choice, channel), text in texts.items():
                if text and WHOLE not in channel and not channel.startswith(TOKENS):
                    yield (choice, True), channel, text

    def _delivered(self) -> dict[Unit, str]:
        form, texts = self.request.form, dict[Unit, str]()
        if self.record.status != 200 or not isinstance(form, Form):
            return texts
        try:
            for pieces in _pieces_of(form, bytes(self.sent)):
                for piece in pieces:
                    choice, channel = unit_of(piece)
                    if not channel.startswith(TOKENS):
                        unit = (choice, channel_of((choice, channel)))
                        texts[unit] = piece.text if piece.whole else texts.get(unit, "") + piece.text
        except (UpstreamError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # An answer that no rule read, and that the guard cannot; the client got it all the same.
            self.truncated = True
        return texts


def capturing_of(judges: Judges, request: GuardedRequest[Texts], record: RequestRecord) -> Capturing | None:
    """None where the policy lets nothing be kept."""
    capture = judges.live.capture
    return None if capture is None else Capturing(capture, request, record)


def _pieces_of(form: Form, sent: bytes) -> Iterator[list[Piece]]:
    if sent.startswith(b"{"):
        answer: Any = json.loads(sent)
        yield form.pieces(answer)
        return
    *frames, _half = sent.split(b"\n\n")
    for raw in frames:
        if error_frame(raw) is None:
            for frame in frames_of(form, raw + b"\n\n"):
                yield frame.pieces
