"""Answers as LiteLLM has them, whole and streamed: objects, dictionaries, or bytes of events.

Owns which API's each is, and the way between LiteLLM's parts of an answer and ``Frame``, which rules judge. Never
decides anything. An answer in which nobody knows where texts are cannot be let pass unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from guard.proxy.errors import UpstreamError
from guard.proxy.wire import Form, Frame, frames_of
from guard.proxy.wire_choices import chat_form, completions_form
from guard.proxy.wire_messages import messages_form
from guard.proxy.wire_responses import responses_form

ANSWERS: Mapping[str, Form | None] = {
    "ModelResponse": chat_form,
    "ModelResponseStream": chat_form,
    "TextCompletionResponse": completions_form,
    "ResponsesAPIResponse": responses_form,
    "EmbeddingResponse": None,
}
"""LiteLLM's classes of answers; None: no text is in it."""

HIDDEN = "_hidden_params"
"""Where LiteLLM keeps what is for itself alone."""


@dataclass(frozen=True)
class Part:
    """One part of an answer. ``given``: as LiteLLM has it; ``frame``: the same for rules."""

    given: Any
    frame: Frame

    def back(self) -> Any:
        """As LiteLLM wants it, with what rules took out of the frame."""
        if isinstance(self.given, bytes):
            return self.frame.to_bytes()
        if not self.frame.changed:
            return self.given
        fields = self.frame.data or {}
        if isinstance(self.given, dict):
            return {**self.given, **fields}
        kind = type(self.given)
        try:
            changed = kind(**fields)
        except ValidationError:
            # Something that LiteLLM takes for granted, as logprobs, was taken out with the text that it shows.
            changed = kind.model_construct(**fields)
        if hidden := getattr(self.given, HIDDEN, None):
            setattr(changed, HIDDEN, hidden)
        return changed


def whole_part(answer: Any) -> Part | None:
    """None for an answer without any text. Raises ``UpstreamError``."""
    form = _form_of(answer)
    if form is None:
        return None
    fields = _fields_of(answer)
    return Part(answer, Frame(b"", fields, None, form.pieces(fields)))


def parts_of(chunks: Sequence[Any]) -> list[Part]:
    """Of all chunks of a stream; bytes of one event may be in several. Raises ``UpstreamError``."""
    parts: list[Part] = []
    text = b""
    for chunk in chunks:
        if isinstance(chunk, bytes | str):
            text += chunk.encode() if isinstance(chunk, str) else chunk
            continue
        form, fields = _form_of(chunk), _fields_of(chunk)
        if form is None:
            raise UpstreamError(f"streams of the kind {type(chunk).__name__} cannot be guarded")
        choices = [choice for choice, _ in form.parts(fields)]
        parts.append(Part(chunk, Frame(b"", fields, choices[0] if choices else None, form.pieces(fields))))
    if text and parts:
        raise UpstreamError("a stream of both bytes and objects cannot be guarded")
    return parts or [Part(frame.raw, frame) for frame in _events(text)]


def _events(text: bytes) -> Iterator[Frame]:
    for raw in text.replace(b"\r\n", b"\n").split(b"\n\n"):
        for frame in frames_of(messages_form, raw + b"\n\n"):
            form = _form_of_event(frame.data or {})
            yield from [frame] if form is messages_form else frames_of(form, frame.to_bytes())


def _form_of_event(data: Mapping[str, Any]) -> Form:
    if "choices" in data:
        return chat_form
    return responses_form if _is_of_responses(data.get("type")) else messages_form


def _is_of_responses(kind: Any) -> bool:
    """Also of a kind that is one of LiteLLM's enumerations of texts."""
    return isinstance(kind, str) and str.startswith(kind, "response.")


def _form_of(answer: Any) -> Form | None:
    if isinstance(answer, dict) and answer.get("type") == "message":
        return messages_form
    name, kind = type(answer).__name__, getattr(answer, "type", None)
    if name not in ANSWERS and (_is_of_responses(kind) or kind == "error"):
        return responses_form
    if name not in ANSWERS:
        raise UpstreamError(f"answers of the kind {name} cannot be guarded")
    return ANSWERS[name]


def _fields_of(answer: Any) -> dict[str, Any]:
    if isinstance(answer, dict):
        return {name: value for name, value in answer.items() if name != HIDDEN}
    fields: dict[str, Any] = answer.model_dump(mode="json")
    return fields
