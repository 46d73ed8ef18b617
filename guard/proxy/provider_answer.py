"""What litellm makes of a provider's answer, as OpenAI's JSON.

Owns which of litellm's additions leave: no usage that it made up, no ending that the provider did not give. Reads its
objects by their fields, and needs none of its code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from guard.proxy.provider_request import CHAT, COMPLETIONS

Fields = dict[str, Any]

SAID = ("content", "text", "reasoning_content", "refusal", "tool_calls", "function_call", "audio")

FINISHED: Mapping[str, str] = {
    **{name: "stop" for name in ("stop", "end_turn", "stop_sequence", "eos", "eos_token", "COMPLETE", "STOP")},
    **{name: "length" for name in ("length", "max_tokens", "MAX_TOKENS", "max_length", "model_length")},
    **{name: "tool_calls" for name in ("tool_calls", "tool_use")},
    **{name: "content_filter" for name in ("content_filter", "content_filtered", "refusal", "SAFETY", "RECITATION")},
    "function_call": "function_call",
}
"""A provider's word for an ending -> OpenAI's. Others are passed on as they are."""


class OddAnswerError(Exception):
    """The provider's answer is none, or broke off."""


def whole_answer(result: Any, model: str, path: str) -> Fields:
    """``model``: as the client calls it. Raises ``OddAnswerError``."""
    fields = _plain(result)
    if path in (CHAT, COMPLETIONS):
        choices = fields.get("choices")
        if not isinstance(choices, list) or not choices:
            raise OddAnswerError
        for choice in choices:
            choice.setdefault("finish_reason", None)
            choice.pop("provider_specific_fields", None)
    elif not _has_vectors(fields.get("data")):
        raise OddAnswerError
    if not _is_told(fields.get("usage"), said=any(_says(one) for one in fields.get("choices") or ())):
        fields.pop("usage", None)
    return {**fields, "model": model}


class Chunks:
    """One stream, chunk by chunk. Every choice ends once, as the provider said. ``usage``: whether it is wanted."""

    def __init__(self, model: str, path: str, *, usage: bool) -> None:
        self._model, self._path, self._wants_usage = model, path, usage
        self._finished: dict[int, bool] = {}
        self._endings: dict[int, str] = {}
        self._called: set[int] = set()
        self._usage: Any = None
        self._head: Fields = {}
        self._said = False

    def add(self, chunk: Any) -> Fields | None:
        """As the client gets it; None for one that says nothing to it. Raises ``OddAnswerError``."""
        fields = _generic(chunk) if isinstance(chunk, dict) else _plain(chunk)
        self._usage = fields.pop("usage", None) or self._usage
        choices = [one for choice in fields.get("choices") or () if (one := self._choice(choice)) is not None]
        if not choices:
            return None
        kept = ("id", "created", "system_fingerprint", "service_tier")
        self._head = {**{name: fields[name] for name in kept if fields.get(name) is not None}, **self._head}
        return self._framed(choices)

    def end(self, *, marked: bool | None) -> list[Fields]:
        """Behind the last: endings that came with a choice's last words, and the usage, if it was told and is wanted.
        ``marked``: whether the provider said that it was the last; None where its form has no word for that. Raises
        ``OddAnswerError`` for a stream that did not come to its end."""
        finished = bool(self._finished) and all(self._finished.values())
        if not self._finished or not (finished if marked is None else marked):
            raise OddAnswerError
        frames = [self._framed([self._ended(index)]) for index in sorted(self._endings)]
        if self._wants_usage and _is_told(self._usage, said=self._said):
            frames.append({**self._framed([]), "usage": self._usage})
        return frames

    def _choice(self, choice: Fields) -> Fields | None:
        index = choice.get("index") or 0
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
        finish, says, first = choice.get("finish_reason"), _says(told), index not in self._finished
        if first and self._path == CHAT:
            delta.setdefault("role", "assistant")
        self._said |= says
        if self._finished.get(index) and not says:
            # What marks the end of a whole stream looks like the end of its first choice.
            return None
        self._finished[index] = self._finished.get(index, False) or bool(finish)
        ending = self._ending(index, finish)
        if says and ending is not None:
            # litellm has one in every chunk of some providers, whose last is true.
            self._endings[index], ending = ending, None
        elif ending is not None:
            self._endings.pop(index, None)
        told["finish_reason"] = ending
        return told if says or first or ending else None

    def _ended(self, index: int) -> Fields:
        told: Fields = {"text": "", "logprobs": None} if self._path == COMPLETIONS else {"delta": {}}
        return {"index": index, **told, "finish_reason": self._endings[index]}

    def _ending(self, index: int, finish: Any) -> str | None:
        if not isinstance(finish, str) or not finish:
            return None
        known = FINISHED.get(finish, finish)
        return "tool_calls" if known == "stop" and index in self._called else known

    def _framed(self, choices: list[Fields]) -> Fields:
        object_ = "chat.completion.chunk" if self._path == CHAT else "text_completion"
        return {**self._head, "object": object_, "model": self._model, "choices": choices}


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
    finish = chunk.get("finish_reason") if chunk.get("is_finished") else None
    return {
        "choices": [{"index": chunk.get("index") or 0, "delta": delta, "finish_reason": finish}],
        "usage": chunk.get("usage"),
    }


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
