"""Named spans become token ranges of the final prompt, for any chat template.

Owns the search: the template is rendered a second time with a marker in place of every message's text, which shows
where each text lands; the real prompt must then be exactly those pieces with the texts between them. A text that the
template rewrites is given up and stays in the next rendering as it is, so that the others are found all the same.
Nothing is assumed about any model's template. Never touches vLLM.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from guard.mia.spec import MAX_RANGES, SELECTOR, AttentionCapture, MiaSpec, Span, TokenRanges, span_of

Message = dict[str, Any]
CharRange = tuple[int, int]
Offsets = npt.NDArray[np.int64]

JOINED_BY = "\n"
"""What vLLM 0.29 puts between the text parts of a content for a template that takes no lists."""

MAX_RENDERINGS = 8
"""Each text that a template rewrites costs another one."""

UNSEEN = "the chat template drops or rewrites this message's text, so it cannot be located in the prompt"
REWRITTEN = "the chat template rewrites this message's text, so it cannot be located in the prompt"
DEPENDENT = "what the chat template writes depends on the messages' texts, so this one cannot be located in the prompt"

T = TypeVar("T")


class SpanError(ValueError):
    """A span that cannot be found in this prompt; the message says why, without prompt text."""


@dataclass(frozen=True)
class LocatedMessage:
    """One message's text in the rendered prompt, by part of its content: None where the template does not show it, an
    error where it may be anywhere.

    A content that is one text is one part; parts that are not text (images) count, and are never shown. ``joined``: the
    whole text where vLLM made one of the parts. ``known_parts`` is False where that cannot be told apart again.
    """

    role: str
    parts: tuple[CharRange | SpanError | None, ...]
    joined: CharRange | None = None
    known_parts: bool = True


class _GiveUpError(Exception):
    """The prompt is not what a rendering with markers says; the texts at ``markers`` may be why."""

    def __init__(self, reason: str, *markers: str) -> None:
        super().__init__(reason)
        self.markers = markers


def locate_messages(
    messages: Sequence[Message], prompt: str, render: Callable[[list[Message]], str]
) -> list[LocatedMessage]:
    """Find every message's text in ``prompt``, which is what ``render(messages)`` gave.

    Raises ``SpanError`` when the template does not give the same prompt twice, or rewrites too many texts.
    """
    key = secrets.token_hex(8)
    texts = {
        _marker(key, i, j): text
        for i, message in enumerate(messages)
        for j, text in enumerate(_texts(message.get("content")))
        if text is not None and text.strip()
    }
    given_up: dict[str, SpanError] = {}
    for rendering in range(1, MAX_RENDERINGS + 1):
        left = texts.keys() - given_up.keys()
        rendered = render([_marked(message, key, i, left) for i, message in enumerate(messages)])
        try:
            found = _walk(prompt, _order(rendered, key), texts)
            break
        except _GiveUpError as failed:
            # A marker that is not there may have been rewritten too, and is then taken for the template's own text.
            unseen = {marker: SpanError(UNSEEN) for marker in left if marker not in rendered}
            more = unseen or {marker: SpanError(str(failed)) for marker in failed.markers}
            if not more or rendering == MAX_RENDERINGS:
                raise SpanError(str(failed)) from None
            given_up |= more
    places: dict[str, CharRange | SpanError] = {**given_up, **found}
    return [
        LocatedMessage(
            str(message.get("role", "")),
            tuple(places.get(_marker(key, i, j)) for j in range(len(_texts(message.get("content"))))),
        )
        for i, message in enumerate(messages)
    ]


def split_joined(located: LocatedMessage, shown: str, content: Any, joined: Any) -> LocatedMessage:
    """Tell the parts of a content apart where vLLM made one text of them, for templates that take no lists.

    shown: the message's text in the prompt. content: as the client sent it. joined: as the template got it.
    """
    if not isinstance(content, list) or not isinstance(joined, str) or located.parts[:1] in ((), (None,)):
        return located
    if isinstance(located.parts[0], SpanError):
        return replace(located, parts=(located.parts[0],) * len(content))
    texts = [part["text"] if _is_text(part) else None for part in content]
    shown_texts = [text for text in texts if text is not None]
    if JOINED_BY.join(shown_texts) != joined or len(shown_texts) < len(texts) or shown not in joined:
        return replace(located, known_parts=len(content) == 1)
    ((begin, end),) = [part for part in located.parts if isinstance(part, tuple)]
    # Templates trim: what is shown of the joined text begins where the rest of it is white space.
    at = begin - joined.index(shown)
    parts: list[CharRange | None] = []
    for text in shown_texts:
        part = (max(begin, at), min(end, at + len(text)))
        parts.append(part if part[0] < part[1] else None)
        at += len(text) + len(JOINED_BY)
    return replace(located, parts=tuple(parts), joined=(begin, end))


def _marker(key: str, message: int | str, part: int | str) -> str:
    return f"mia{key}n{message}p{part}e"


def _texts(content: Any) -> list[str | None]:
    """The text of every part of a content: None of what is not text."""
    if isinstance(content, str):
        return [content]
    return [part["text"] if _is_text(part) else None for part in content] if isinstance(content, list) else []


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _marked(message: Message, key: str, i: int, markers: Set[str]) -> Message:
    """A copy of message ``i`` in which its own of ``markers`` stand for their texts."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": marker if (marker := _marker(key, i, 0)) in markers else content}
    if isinstance(content, list):
        parts = [
            {**part, "text": marker} if (marker := _marker(key, i, j)) in markers else part
            for j, part in enumerate(content)
        ]
        return {**message, "content": parts}
    return message


def _order(rendered: str, key: str) -> list[tuple[str, str]]:
    """The rendered text as ``(marker, literal after it)`` in order; the first entry has no marker."""
    pieces, end, name = [], 0, ""
    seen = Counter[str]()
    for place in re.finditer(_marker(key, r"\d+", r"\d+"), rendered):
        pieces.append((name, rendered[end : place.start()]))
        end, name = place.end(), place[0]
        seen[name] += 1
    if repeated := [marker for marker, count in seen.items() if count > 1]:
        raise _GiveUpError("the chat template shows this message more than once", *repeated)
    return [*pieces, (name, rendered[end:])]


def _walk(prompt: str, pieces: list[tuple[str, str]], texts: dict[str, str]) -> dict[str, CharRange]:
    """Where each marker's text lies, if the prompt is exactly these pieces. Raises ``_GiveUpError``."""
    found: dict[str, CharRange] = {}
    at = 0
    for (marker, literal), (following, _) in zip(pieces, [*pieces[1:], ("", "")], strict=True):
        forms = [form for form in _forms(texts[marker]) if prompt.startswith(form, at)] if marker else [""]
        if not forms:
            raise _GiveUpError(REWRITTEN, marker)
        # Whichever way the text is shown, the literal after it must follow at once.
        form = next((form for form in forms if prompt.startswith(literal, at + len(form))), None)
        end = len(prompt) if form is None else at + len(form) + len(literal)
        if form is None or (not following and end != len(prompt)):
            raise _GiveUpError(DEPENDENT, *(name for name in (marker, following) if name))
        if marker:
            found[marker] = (at, at + len(form))
        at = end
    return found


def _forms(text: str) -> list[str]:
    """How templates show a text: as it is, trimmed, or inside a JSON string."""
    trimmed = dict.fromkeys((text, text.strip(), text.rstrip(), text.lstrip()))
    escaped = (json.dumps(form, ensure_ascii=ascii)[1:-1] for form in trimmed for ascii in (False, True))
    return list(dict.fromkeys((*trimmed, *escaped)))


def select(selector: str, messages: Sequence[LocatedMessage]) -> list[CharRange]:
    """What a selector names, in order: ``ROLE``, ``ROLE.first``, ``ROLE.last`` or ``message.N``, or a part of these."""
    match = SELECTOR.fullmatch(selector)
    if match is None:
        raise SpanError(f"{selector!r} is not a selector")
    if match["index"] is not None:
        chosen = _nth(messages, int(match["index"]))
    else:
        named = [message for message in messages if message.role == match["role"]]
        chosen = {"first": named[:1], "last": named[-1:]}.get(match["which"] or "all", named)
    if match["part"] is not None and not all(message.known_parts for message in chosen):
        raise SpanError("the parts of this content were made one text that cannot be taken apart again")
    parts = [
        part
        for message in chosen
        for part in (_whole(message) if match["part"] is None else _nth(message.parts, int(match["part"])))
    ]
    for part in parts:
        if isinstance(part, SpanError):
            raise part
    return [part for part in parts if isinstance(part, tuple)]


def _whole(message: LocatedMessage) -> Sequence[CharRange | SpanError | None]:
    return message.parts if message.joined is None else [message.joined]


def _nth(items: Sequence[T], index: int) -> list[T]:
    return [items[index]] if -len(items) <= index < len(items) else []


def to_tokens(ranges: Sequence[CharRange], offsets: Offsets) -> tuple[tuple[int, int], ...]:
    """Token ranges that touch the character ranges. offsets: ``[tokens, 2]``, each token's first character and the one
    after its last, in order."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    inside = np.zeros(len(offsets) + 2, np.bool_)
    for begin, stop in ranges:
        inside[1:-1] |= (starts < stop) & (ends > begin)
    # A token without characters is in no range, and parts the tokens around it.
    inside[1:-1] &= ends > starts
    edges = np.flatnonzero(np.diff(inside)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def resolve(span: Span, messages: Sequence[LocatedMessage], offsets: Offsets | None, prompt_len: int) -> TokenRanges:
    """Token ranges of one span. Raises ``SpanError`` when it is empty or outside the prompt."""
    if isinstance(span, TokenRanges):
        if max(end for _, end in span.tokens) > prompt_len:
            raise SpanError(f"token ranges end beyond the prompt's {prompt_len} tokens")
        return span
    if offsets is None:
        raise SpanError("this prompt has no token offsets (slow tokenizer, or not text alone)")
    ranges = [r for selector in span for r in select(selector, messages)]
    tokens = to_tokens(ranges, offsets)
    if not tokens:
        raise SpanError(f"no message's text in the prompt matches {', '.join(span)}")
    if len(tokens) > MAX_RANGES:
        raise SpanError(f"it is in {len(tokens)} places of the prompt, more than {MAX_RANGES}")
    return TokenRanges(tokens=tokens)


@dataclass(frozen=True)
class ResolvedSpec:
    """A spec whose spans are token ranges. ``unavailable`` holds, by capture name, why a capture had to be left out."""

    spec: MiaSpec
    unavailable: dict[str, str]


def resolve_spec(
    spec: MiaSpec,
    messages: Sequence[LocatedMessage] | SpanError,
    offsets: Sequence[tuple[int, int]] | None,
    prompt_len: int,
) -> ResolvedSpec:
    """Resolve every span; captures on spans that cannot be found are left out with the reason, the rest stays."""
    edges = None if offsets is None or not spec.needs_messages else np.asarray(offsets, np.int64).reshape(-1, 2)
    resolved: dict[str, Span] = {}
    failed: dict[str, str] = {}
    for name, span in spec.spans.items():
        try:
            if isinstance(messages, SpanError) and not isinstance(span, TokenRanges):
                raise messages
            located = [] if isinstance(messages, SpanError) else messages
            resolved[name] = resolve(span, located, edges, prompt_len)
        except SpanError as error:
            failed[name] = str(error)
    unavailable: dict[str, str] = {}
    for name, capture in spec.captures.items():
        spans = (*(capture.spans if isinstance(capture, AttentionCapture) else ()), *span_of(capture))
        if any(span in failed for span in spans):
            unavailable[name] = "; ".join(f"span {span!r}: {failed[span]}" for span in spans if span in failed)
        elif (
            isinstance(capture.positions, TokenRanges) and max(end for _, end in capture.positions.tokens) > prompt_len
        ):
            unavailable[name] = f"token ranges end beyond the prompt's {prompt_len} tokens"
    if not unavailable and not spec.needs_messages:
        return ResolvedSpec(spec, unavailable)
    kinds = ("hidden", "probes", "attention", "qk")
    left = {kind: {name: one for name, one in getattr(spec, kind).items() if name not in unavailable} for kind in kinds}
    return ResolvedSpec(spec.model_copy(update={"spans": resolved, **left}), unavailable)
