"""Windows: stretches of a long text that the model reads once more, each in a pass of its own.

Owns where a text is cut, the short conversation that a pass is, and one score from those of the whole prompt and of its
windows. In a long prompt what surrounds an attack dilutes what the model computes at the prompt's end; a pass of
instruction and one window ends right behind the window. Never asks a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from detectors.base import Score
from detectors.model_config import Section
from guard.blank_text import is_blank

INSTRUCTION, DATA = "instruction", "data"
TEXTS: Mapping[str, tuple[str, ...]] = {INSTRUCTION: ("system",), DATA: ("user.last", "tool")}
"""Where these are in a prompt, unless the policy binds them otherwise: the operator's instruction, and what arrives
from outside."""
CUT: Mapping[str, tuple[str, ...]] = {**TEXTS, DATA: ("last_turn", *TEXTS[DATA])}
"""What passes are made of, alike: a document that a turn begins with is cut as well, whatever message follows it."""
IN_PASS: Mapping[str, tuple[str, ...]] = {INSTRUCTION: ("system",), DATA: ("user.last",)}
"""Where these are in a pass."""

SENTENCE_END = re.compile(r"[.!?\u3002]\s")


UNREAD = Score("unavailable", reason="its windows were not read")
MORE = Score("unavailable", reason="the data has more windows than are read")


class Windows(Section):
    """``characters``: of a window at most. ``stride``: of what one has more than the one before it, at most; half of it
    at least, but at a text's end. ``most``: passes of one request.

    With a stride of at most half of ``characters``, what is no longer than half a stride, or than ``characters`` minus
    two strides, is whole in one window. No more than that: a window begins where an earlier one ended, which may be
    nearly a stride behind the first character that it would have room for.
    """

    characters: Annotated[int, Field(ge=40, le=100_000)] = 400
    stride: Annotated[int, Field(ge=20, le=100_000)] = 200
    most: Annotated[int, Field(ge=1, le=1024)] = 128

    @model_validator(mode="after")
    def _every_character_is_in_one(self) -> Self:
        check_stride(self.stride, self.characters)
        return self


def check_stride(stride: int, characters: int) -> None:
    """Raise ``ValueError`` for a stride that leaves characters out of windows of so many."""
    if stride > characters:
        raise ValueError("a stride longer than a window leaves characters out")


@dataclass(frozen=True)
class Window:
    """Characters [start, end) of the text with this number."""

    text: int
    start: int
    end: int


@dataclass(frozen=True)
class Cut:
    """Each text once. ``more``: there are windows beyond ``windows``, which ``most`` leaves out."""

    windows: tuple[Window, ...]
    more: bool


def cut(texts: Sequence[str], windows: Windows) -> Cut:
    """The windows of texts, none of which reaches from one text into the next. None where all of them together are no
    longer than one window."""
    if sum(map(len, texts)) <= windows.characters:
        return Cut((), False)
    stretches = ((i, start, end) for i, text in enumerate(texts) for start, end in _stretches(text, windows))
    some = list(islice(stretches, windows.most))
    # Of those that say the same the first, and none that says nothing.
    different = {texts[i][start:end]: Window(i, start, end) for i, start, end in reversed(some)}
    found = [one for text, one in reversed(different.items()) if not is_blank(text)]
    return Cut(tuple(sorted(found, key=lambda one: (one.text, one.start))), next(stretches, None) is not None)


def _stretches(text: str, windows: Windows) -> Iterator[tuple[int, int]]:
    """Each ends where a line or a sentence does, or else a word, and begins where an earlier one ended."""
    edges = [0]
    while edges[-1] < len(text):
        edges.append(_next_edge(text, edges[-1], windows.stride))
        end = edges[-1]
        yield next(start for start in edges if end - start <= windows.characters), end
        edges = [start for start in edges if end - start < windows.characters]


def _next_edge(text: str, at: int, stride: int) -> int:
    """At most ``stride`` characters further on, and in the second half of these."""
    low, high = at + (stride + 1) // 2, at + stride
    if high >= len(text):
        return len(text)
    if (line := text.rfind("\n", low, high)) >= 0:
        return line + 1
    if sentences := [found.end() for found in SENTENCE_END.finditer(text, low, high)]:
        return sentences[-1]
    return word + 1 if (word := text.rfind(" ", low, high)) >= 0 else high


def pass_messages(instruction: str, window: str) -> tuple[dict[str, str], ...]:
    """What the model reads in a pass: the instruction, if there is one, and the window as what a user says."""
    system = () if is_blank(instruction) else ({"role": "system", "content": instruction},)
    return (*system, {"role": "user", "content": window})


def texts_in(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Of a conversation, its instruction and its data where no policy says otherwise (``CUT``)."""
    roles = [message["role"] for message in messages]
    said = [i for i, role in enumerate(roles) if role == "user"]
    brought = [i for i, role in enumerate(roles) if role not in ("assistant", "system", "developer")]
    # An answer behind everything that was brought in was replied to by nobody.
    begin = max((i + 1 for i in range(max(brought, default=0)) if roles[i] == "assistant"), default=0)
    in_turn = [i for i in range(begin, len(roles)) if roles[i] not in ("system", "developer")]
    data = {*in_turn, *said[-1:], *(i for i, role in enumerate(roles) if role == "tool")}
    instruction = [text for message in messages if message["role"] == "system" for text in _texts(message)]
    return "\n".join(instruction), [text for i in sorted(data) for text in _texts(messages[i])]


def _texts(message: Mapping[str, Any]) -> list[str]:
    """Of a content that is one text, or a list of parts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return [text for part in parts if isinstance(part, Mapping) and isinstance(text := part.get("text"), str)]


def passes_of(messages: Sequence[Mapping[str, Any]], windows: Windows) -> tuple[list[tuple[dict[str, str], ...]], bool]:
    """The conversations that are read of one beside it, and whether it has more windows than these."""
    instruction, data = texts_in(messages)
    found = cut(data, windows)
    return [pass_messages(instruction, data[one.text][one.start : one.end]) for one in found.windows], found.more


def placed(score: Score, message: int, part: int, window: Window) -> Score:
    """The score of a window, with where it is: characters of a part of a message, all counted from 0."""
    place = {"window_message": message, "window_part": part, "window_start": window.start, "window_end": window.end}
    return replace(score, details=(*score.details, *((name, float(at)) for name, at in place.items())))


def windowed(whole: Score, windows: Sequence[Score], unread: Score | None = None) -> Score:
    """The highest score of the whole prompt and of its windows, with the whole prompt's passages. ``unread``: why there
    are more windows than these.

    What is missing among them makes it a score that is *at least* this high; where all are missing there is none.
    """
    scores = [whole, *windows]
    missing = [one for one in (*scores, *([unread] if unread else [])) if one.status != "scored" or one.floor]
    worst = max((one for one in scores if one.value is not None), key=lambda one: one.value or 0.0, default=None)
    if worst is None:
        return missing[0]
    worst = replace(worst, passages=whole.passages)
    if not missing:
        return worst
    late = all(one.timed_out for one in missing)
    return replace(worst, floor=True, reason=missing[0].reason, timed_out=late)
