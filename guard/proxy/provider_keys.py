"""The providers' keys in what providers say: they leave in nothing, whoever quotes them.

Owns how a key is found in texts, whole or in pieces over the frames of a stream. Of each text of a stream only an end
that may be the beginning of a key waits, shorter than that, whatever other texts come in between.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

HIDDEN = "[key]"

MIN_CHARACTERS = 8
"""A shorter text is no secret, and might be a word."""

NAMED_AS_KEYS = re.compile(r"(?i)(?:key|token|secret|password)(?:_?id)?$")
"""Environment variables where litellm may find a key by itself."""

AT_ONCE = ("role", "type", "id", "index", "finish_reason")
"""Fields that do not go on in the next frame, or not as texts."""

GO_ON = frozenset(
    (
        *("content", "text", "reasoning", "reasoning_content", "refusal", "arguments", "input", "thinking", "summary"),
        *("transcript", "data"),
    )
)
"""Fields whose text clients put together from many frames. Any other one comes whole, and many a client takes its first
frame for all of it: only an end that is no name any more waits."""

LOGPROBS = "logprobs"

Fields = dict[str, Any]
Place = tuple[str | int, ...]
"""Where in a choice a text belongs: names of fields, and numbers of items as the provider counts them."""


def keys_in(environment: Mapping[str, str]) -> set[str]:
    return {value for name, value in environment.items() if NAMED_AS_KEYS.search(name)}


class Keys:
    def __init__(self, keys: Collection[str]) -> None:
        self._keys = sorted({key for key in keys if len(key) >= MIN_CHARACTERS}, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._keys)) or "(?!)")

    def hide(self, text: str) -> str:
        return self._any.sub(HIDDEN, text)

    def hide_in(self, value: Any) -> bool:
        """In all texts of a JSON value, and the names of its fields, at any depth. True if there was one."""
        found = False
        waiting = [value]
        while waiting:
            one = waiting.pop()
            for name in [name for name in one if isinstance(one, dict) and self._any.search(name)]:
                one[self.hide(name)], found = one.pop(name), True
            for place, inner in list(one.items() if isinstance(one, dict) else enumerate(one)):
                if isinstance(inner, dict | list):
                    waiting.append(inner)
                elif isinstance(inner, str) and self._any.search(inner):
                    one[place], found = self.hide(inner), True
        return found

    def beginning_at_end(self, text: str) -> int:
        """How many characters at its end may be the beginning of a key."""
        return max((_shared(text, key) for key in self._keys), default=0)


def _shared(text: str, key: str) -> int:
    return next((size for size in range(min(len(key) - 1, len(text)), 0, -1) if text.endswith(key[:size])), 0)


def hide_in_answer(keys: Keys, fields: Fields) -> None:
    """Of a choice that has one, log probabilities go: they spell it once more, token by token."""
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and keys.hide_in(choice):
            choice.pop(LOGPROBS, None)
    keys.hide_in(fields)


@dataclass
class _End:
    """The end of a text, which may be the beginning of a key; of it ``shown`` characters have left."""

    text: str = ""
    shown: int = 0


@dataclass
class _Said:
    """Of one choice, what waits: the end of each text, and the log probabilities that spell such an end."""

    ends: dict[Place, _End] = field(default_factory=dict)
    logprobs: Fields = field(default_factory=dict)


class FrameKeys:
    """One stream's frames on their way out."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._said: dict[Any, _Said] = {}
        self._head: Fields = {}

    def add(self, frame: Fields) -> list[Fields]:
        """Those that may leave now."""
        self._head = {name: value for name, value in frame.items() if name not in ("choices", "usage")}
        ahead: list[Fields] = []
        for choice in frame.get("choices") or ():
            said = self._said.setdefault(choice.get("index"), _Said())
            self._pass(said, choice)
            if choice.get("finish_reason"):
                ahead += self._left(choice.get("index"))
        hide_in_answer(self._keys, frame)
        return [*ahead, frame]

    def rest(self) -> list[Fields]:
        """What waits, where nothing comes behind it."""
        return [frame for index in list(self._said) for frame in self._left(index)]

    def _pass(self, said: _Said, choice: Fields) -> None:
        found = False
        for place, owner, name in list(_texts_in(choice, ())):
            end = said.ends.pop(place, _End())
            text = end.text + owner[name]
            if (hidden := self._keys.hide(text)) != text:
                found, end = True, _End()
            waits = self._keys.beginning_at_end(hidden)
            begins = len(hidden) - waits
            shown = max(end.shown, begins if name in GO_ON or waits >= MIN_CHARACTERS else len(hidden))
            owner[name] = hidden[end.shown : shown]
            if waits:
                said.ends[place] = _End(hidden[begins:], shown - begins)
        logprobs = None if found else _joined(said.logprobs, choice.get(LOGPROBS))
        waiting = logprobs if any(len(end.text) > end.shown for end in said.ends.values()) else None
        # They spell what waits.
        said.logprobs = waiting or {}
        if LOGPROBS in choice or (logprobs and not waiting):
            choice[LOGPROBS] = None if waiting else logprobs

    def _left(self, index: Any) -> list[Fields]:
        said = self._said.pop(index)
        frames = []
        for place, end in said.ends.items():
            if end.text[end.shown :]:
                choice: Fields = {"index": index, "finish_reason": None}
                _put(choice, place, end.text[end.shown :])
                frames.append({**self._head, "choices": [choice]})
        if said.logprobs and frames:
            frames[-1]["choices"][0][LOGPROBS] = said.logprobs
        return frames


def _texts_in(held: Fields, place: Place) -> Iterator[tuple[Place, Fields, str]]:
    """Every text that may go on from frame to frame, with where it belongs."""
    for name, value in held.items():
        if name in AT_ONCE or name == LOGPROBS:
            continue
        if isinstance(value, str):
            yield (*place, name), held, name
        elif isinstance(value, dict):
            yield from _texts_in(value, (*place, name))
        elif isinstance(value, list):
            for i, one in enumerate(value):
                if isinstance(one, dict):
                    number = one.get("index", i)
                    yield from _texts_in(one, (*place, name, number if isinstance(number, int) else i))


def _put(held: Fields, place: Place, text: str) -> None:
    """A text where it belongs, in a choice that has nothing else."""
    name, rest = str(place[0]), place[1:]
    if not rest:
        held[name] = text
    elif isinstance(rest[0], int):
        held[name] = [item := {"index": rest[0]}]
        _put(item, rest[1:], text)
    else:
        inner: Fields = {}
        held[name] = inner
        _put(inner, rest, text)


def _joined(before: Fields, logprobs: Any) -> Any:
    """Log probabilities of two frames in turn: lists of as many tokens."""
    if not before or not isinstance(logprobs, dict):
        return logprobs or before or None
    both = dict(before)
    for name, value in logprobs.items():
        had = both.get(name)
        both[name] = [*had, *value] if isinstance(had, list) and isinstance(value, list) else value or had
    return both
