"""The providers' keys in what providers say: they leave in nothing, whoever quotes them.

Owns how a key is found in texts, whole or in pieces over the frames of a stream. Frames wait only while the end of one
of their texts may be the beginning of a key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

HIDDEN = "[key]"

MIN_CHARACTERS = 8
"""A shorter text is no secret, and might be a word."""

NAMED_AS_KEYS = re.compile(r"(?i)(?:key|token|secret|password)(?:_?id)?$")
"""Environment variables where litellm may find a key by itself."""

AT_ONCE = ("role", "type", "id", "finish_reason", "logprobs")
"""Fields that do not go on in the next frame, or not as texts."""

Fields = dict[str, Any]
Slot = tuple[Fields, str]


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

    def may_begin_at_end(self, text: str) -> bool:
        """Whether a key may go on behind it."""
        return any(
            text.endswith(key[:size]) for key in self._keys for size in range(min(len(key) - 1, len(text)), 0, -1)
        )


def hide_in_answer(keys: Keys, fields: Fields) -> None:
    """Of a choice that has one, log probabilities go: they spell it once more, token by token."""
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and keys.hide_in(choice):
            choice.pop("logprobs", None)
    keys.hide_in(fields)


class FrameKeys:
    """One stream's frames on their way out."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._waiting: list[Fields] = []
        self._texts: dict[tuple[Any, ...], list[Slot]] = {}
        self._over: set[tuple[Any, ...]] = set()

    def add(self, frame: Fields) -> list[Fields]:
        """Those that may leave now."""
        self._waiting.append(frame)
        choices = frame.get("choices") or ()
        ended = {choice.get("index") for choice in choices if choice.get("finish_reason")}
        going_on = dict(_slots(frame))
        for place, slot in going_on.items():
            self._texts.setdefault(place, []).append(slot)
        # A name or a role comes once: a frame of its choice that is without goes on with something else.
        spoken = {choice.get("index") for choice in choices}
        self._over |= {place for place in self._texts if place[0] in spoken and place not in going_on}
        self._over |= {place for place in self._texts if place[0] in ended}
        for place, slots in self._texts.items():
            if place not in self._over and self._keys.may_begin_at_end("".join(one[name] for one, name in slots)):
                return []
        return self.rest()

    def rest(self) -> list[Fields]:
        """All others, where nothing comes behind them."""
        for slots in self._texts.values():
            self._hide(slots)
        frames, self._waiting, self._texts, self._over = self._waiting, [], {}, set()
        for frame in frames:
            hide_in_answer(self._keys, frame)
        return frames

    def _hide(self, slots: list[Slot]) -> None:
        text = "".join(one[name] for one, name in slots)
        if (hidden := self._keys.hide(text)) == text:
            return
        for i, (one, name) in enumerate(slots):
            one[name] = hidden if i == 0 else ""
        for frame in self._waiting:
            for choice in frame.get("choices") or ():
                choice.pop("logprobs", None)


def _slots(frame: Fields) -> Iterator[tuple[tuple[Any, ...], Slot]]:
    """Every text that goes on from frame to frame, with where it belongs."""
    for choice in frame.get("choices") or ():
        yield from _texts_in(choice, (choice.get("index"),))


def _texts_in(held: Fields, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Slot]]:
    for name, value in held.items():
        if name in AT_ONCE:
            continue
        if isinstance(value, str):
            yield (*place, name), (held, name)
        elif isinstance(value, dict):
            yield from _texts_in(value, (*place, name))
        elif isinstance(value, list):
            for i, one in enumerate(value):
                if isinstance(one, dict):
                    yield from _texts_in(one, (*place, name, one.get("index", i)))
