"""What litellm makes of a provider's answer, as OpenAI's JSON.

Owns which of litellm's additions leave: no usage that it made up, no ending that the provider did not give
(``provider_endings``). Reads its objects by their fields, and needs none of its code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from guard.proxy.provider_request import CHAT, COMPLETIONS

Fields = dict[str, Any]

SAID = ("content", "text", "reasoning_content", "refusal", "tool_calls", "function_call", "audio")

FINISHED: Mapping[str, str] = {
    **{name: "stop" for name in ("stop", "end_turn", "stop_sequence", "eos", "eos_token", "complete", "finish")},
    **{name: "stop" for name in ("finished", "completed", "endoftext", "stop_criteria_met")},
    **{name: "length" for name in ("length", "max_tokens", "max_length", "model_length", "max_output_tokens")},
    **{name: "length" for name in ("token_limit", "error_limit", "model_context_window_exceeded", "continuation")},
    **{name: "tool_calls" for name in ("tool_calls", "tool_use", "tool_call")},
    **{name: "content_filter" for name in ("content_filter", "content_filtered", "refusal", "safety", "recitation")},
    **{name: "content_filter" for name in ("blocklist", "prohibited_content", "spii", "language", "image_safety")},
    **{name: "content_filter" for name in ("image_prohibited_content", "image_recitation", "guardrail_intervened")},
    **{name: "content_filter" for name in ("error_toxic", "sensitive", "model_armor", "escalation")},
    "function_call": "function_call",
}
"""A provider's word for an ending, in small letters -> OpenAI's. Others are passed on as they are: each says that
something else happened."""

MAX_WORD = 64
"""Characters of an ending's word."""


class OddAnswerError(Exception):
    """The provider's answer is none, or broke off."""


def whole_answer(result: Any, model: str, path: str, endings: Mapping[int, str]) -> Fields:
    """``model``: as the client calls it. ``endings``: of each choice, in the provider's word and order. Raises
    ``OddAnswerError``."""
    fields = _plain(result)
    if path in (CHAT, COMPLETIONS):
        choices: Any = fields.get("choices")
        if not choices or len(choices) != len(endings):
            raise OddAnswerError
        # Some choices litellm numbers by their place. It never changes that.
        for choice, word in zip(choices, endings.values(), strict=True):
            called = bool((choice.get("message") or {}).get("tool_calls"))
            choice["finish_reason"] = _ending(word, called=called)
            choice.pop("provider_specific_fields", None)
        if len({choice.setdefault("index", 0) for choice in choices}) < len(choices):
            raise OddAnswerError
    elif not _has_vectors(fields.get("data")):
        raise OddAnswerError
    if not _is_told(fields.get("usage"), said=any(_says(one) for one in fields.get("choices") or ())):
        fields.pop("usage", None)
    return {**fields, "model": model}


class Chunks:
    """One stream, chunk by chunk. Every choice ends once, at the stream's end, when nothing more can come of it.
    ``choices``: how many were asked for; ``usage``: whether it is wanted."""

    def __init__(self, model: str, path: str, *, choices: int, usage: bool) -> None:
        self._model, self._path, self._choices, self._wants_usage = model, path, choices, usage
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._usage: Fields = {}
        self._head: Fields = {}
        self._said = False

    def add(self, chunk: Any) -> Fields | None:
        """As the client gets it; None for one that says nothing to it. Raises ``OddAnswerError``."""
        fields = _generic(chunk) if isinstance(chunk, dict) else _plain(chunk)
        self._count(fields.pop("usage", None))
        choices = [one for choice in fields.get("choices") or () if (one := self._choice(choice)) is not None]
        if not choices:
            return None
        kept = ("id", "created", "system_fingerprint", "service_tier")
        self._head = {**{name: fields[name] for name in kept if fields.get(name) is not None}, **self._head}
        return self._framed(choices)

    def end(self, endings: Mapping[int, str]) -> list[Fields]:
        """Behind the last: how each choice ended, and the usage, if it was told and is wanted. ``endings``: in the
        provider's words. Raises ``OddAnswerError`` for a stream that did not come to its end."""
        if not endings or self._begun != endings.keys():
            raise OddAnswerError
        frames = [self._framed([self._ended(index, endings[index])]) for index in sorted(endings)]
        if self._wants_usage and _is_told(self._usage, said=self._said):
            frames.append({**self._framed([]), "usage": self._usage})
        return frames

    @property
    def told(self) -> Fields:
        """What the provider has told of its usage so far, as far as it is true of this answer."""
        prompt, completion = (self._usage.get(f"{name}_tokens") for name in ("prompt", "completion"))
        names = {"input_tokens": prompt, "output_tokens": completion}
        return {name: value for name, value in names.items() if value}

    def _count(self, usage: Any) -> None:
        """Some tell the prompt's tokens first and the answer's last, with zeros that litellm puts beside them."""
        if not isinstance(usage, dict):
            return
        both = self._usage, usage
        counts = {name: max(_count_in(one, name) for one in both) for name in ("prompt_tokens", "completion_tokens")}
        self._usage = {**self._usage, **usage, **counts, "total_tokens": sum(counts.values())}

    def _choice(self, choice: Fields) -> Fields | None:
        index = choice.get("index") or 0
        if not 0 <= index < self._choices:
            raise OddAnswerError
        delta = {name: value for name, value in (choice.get("delta") or {}).items() if value is not None}
        delta.pop("provider_specific_fields", None)
        if self._path == COMPLETIONS:
            text = choice.get("text") or delta.get("content") or ""
            told: Fields = {"index": index, "text": text, "logprobs": choice.get("logprobs")}
        else:
            told = {"index": index, "delta": delta}
            if choice.get("logprobs") is not None:
                told["logprobs"] = choice["logprobs"]
        if delta.get("tool_calls"):
            self._called.add(index)
        says, first = _says(told), index not in self._begun
        if first and self._path == CHAT:
            delta.setdefault("role", "assistant")
        self._begun.add(index)
        self._said |= says
        return {**told, "finish_reason": None} if says or first else None

    def _ended(self, index: int, word: str) -> Fields:
        told: Fields = {"text": "", "logprobs": None} if self._path == COMPLETIONS else {"delta": {}}
        return {"index": index, **told, "finish_reason": _ending(word, called=index in self._called)}

    def _framed(self, choices: list[Fields]) -> Fields:
        object_ = "chat.completion.chunk" if self._path == CHAT else "text_completion"
        return {**self._head, "object": object_, "model": self._model, "choices": choices}


def _ending(word: str, *, called: bool) -> str:
    """In OpenAI's word, where it has one. Raises ``OddAnswerError``."""
    if len(word) > MAX_WORD:
        raise OddAnswerError
    known = FINISHED.get(word.lower(), word)
    return "tool_calls" if known == "stop" and called else known


def _count_in(usage: Fields, name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _plain(value: Any) -> Fields:
    """Raises ``OddAnswerError``."""
    try:
        fields: Any = json.loads(value.model_dump_json(exclude_none=True))
    except (AttributeError, TypeError, ValueError):
        raise OddAnswerError from None
    if not isinstance(fields, dict):
        raise OddAnswerError
    return fields


def _generic(chunk: Fields) -> Fields:
    """A chunk in litellm's own form for providers that have none like OpenAI's."""
    delta = {"content": chunk.get("text") or None, "tool_calls": [chunk["tool_use"]] if chunk.get("tool_use") else None}
    choices = [{"index": chunk.get("index") or 0, "delta": delta}] if any(delta.values()) else []
    return {"choices": choices, "usage": chunk.get("usage")}


def _has_vectors(data: Any) -> bool:
    """Of numbers, or as bytes in base64."""
    if not isinstance(data, list) or not data:
        return False
    vectors = [one.get("embedding") if isinstance(one, dict) else None for one in data]
    return all(isinstance(one, list | str) and one for one in vectors)


def _says(choice: Fields) -> bool:
    held = (choice, choice.get("delta"), choice.get("message"))
    return any(one.get(name) for one in held if isinstance(one, dict) for name in SAID)


def _is_told(usage: Any, *, said: bool) -> bool:
    """Whether it is the provider's: litellm puts zeros where a provider says nothing, and no prompt has no token."""
    if not isinstance(usage, dict):
        return False
    prompt, completion = (usage.get(f"{name}_tokens") for name in ("prompt", "completion"))
    return bool(prompt) and bool(completion or not said)
