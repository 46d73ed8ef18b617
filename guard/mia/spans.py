"""Named spans become token ranges of the final prompt, for any chat template.

Owns the search: the template is rendered a second time with a marker in place of every message's text, which shows
where each text lands; the real prompt must then be exactly those pieces with the texts between them. Nothing is assumed
about any model's template. Never touches vLLM.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from guard.mia.spec import MAX_RANGES, SELECTOR, AttentionCapture, MiaSpec, Span, TokenRanges, span_of

Message = dict[str, Any]
CharRange = tuple[int, int]
Offsets = Sequence[tuple[int, int]]

JOINED_BY = "\n"
"""What vLLM 0.29 puts between the text parts of a content for a template that takes no lists."""

T = TypeVar("T")


class SpanError(ValueError):
    """A span that cannot be found in this prompt; the message says why, without prompt text."""


@dataclass(frozen=True)
class LocatedMessage:
    """One message's text in the rendered prompt, by part of its content: None where the template does not show it.

    A content that is one text is one part; parts that are not text (images) count, and are never shown. ``joined``: the
    whole text where vLLM made one of the parts. ``known_parts`` is False where that cannot be told apart again.
    """

    role: str
    parts: tuple[CharRange | None, ...]
    joined: CharRange | None = None
    known_parts: bool = True


def locate_messages(
    messages: Sequence[Message], prompt: str, render: Callable[[list[Message]], str]
) -> list[LocatedMessage]:
    """Find every message's text in ``prompt``, which is what ``render(messages)`` gave.

    Raises ``SpanError`` when the template changes texts or shows them in a way that markers do not.
    """
    marked, texts = _mark(messages)
    pieces = _order(render(marked), list(texts))
    found = _walk(prompt, pieces, texts)
    return [
        LocatedMessage(
            str(message.get("role", "")),
            tuple(found.get(marker) for marker in _markers(marked_message)),
        )
        for message, marked_message in zip(messages, marked, strict=True)
    ]


def split_joined(located: LocatedMessage, shown: str, content: Any, joined: Any) -> LocatedMessage:
    """Tell the parts of a content apart where vLLM made one text of them, for templates that take no lists.

    shown: the message's text in the prompt. content: as the client sent it. joined: as the template got it.
    """
    if not isinstance(content, list) or not isinstance(joined, str) or located.parts[:1] in ((), (None,)):
        return located
    texts = [part["text"] if _is_text(part) else None for part in content]
    shown_texts = [text for text in texts if text is not None]
    if JOINED_BY.join(shown_texts) != joined or len(shown_texts) < len(texts):
        return replace(located, known_parts=len(content) == 1)
    ((begin, end),) = [part for part in located.parts if part is not None]
    # Templates trim: what is shown of the joined text begins where the rest of it is white space.
    at = begin - joined.index(shown)
    parts: list[CharRange | None] = []
    for text in shown_texts:
        part = (max(begin, at), min(end, at + len(text)))
        parts.append(part if part[0] < part[1] else None)
        at += len(text) + len(JOINED_BY)
    return replace(located, parts=tuple(parts), joined=(begin, end))


def _mark(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """Copies of ``messages`` with a marker for every text, and the texts by marker."""
    key = secrets.token_hex(8)
    texts: dict[str, str] = {}

    def marker(text: str) -> str:
        name = f"mia{key}n{len(texts)}e"
        texts[name] = text
        return name

    marked = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            content = marker(content)
        elif isinstance(content, list):
            content = [
                {**part, "text": marker(part["text"])} if _is_text(part) and part["text"].strip() else part
                for part in content
            ]
        marked.append({**message, "content": content})
    return marked, texts


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _markers(message: Message) -> list[str]:
    """The marker of every part of the content; what has none gets a text that is no marker."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] if _is_text(part) else "" for part in content] if isinstance(content, list) else []


def _order(rendered: str, markers: list[str]) -> list[tuple[str, str]]:
    """The rendered text as ``(marker, literal after it)`` in order; the first entry has no marker."""
    places = []
    for marker in markers:
        if (count := rendered.count(marker)) > 1:
            raise SpanError(f"the chat template shows a message {count} times")
        if count == 1:
            places.append((rendered.index(marker), marker))
    places.sort()
    pieces, end, name = [], 0, ""
    for place, marker in places:
        pieces.append((name, rendered[end:place]))
        end, name = place + len(marker), marker
    return [*pieces, (name, rendered[end:])]


def _walk(prompt: str, pieces: list[tuple[str, str]], texts: dict[str, str]) -> dict[str, CharRange]:
    found: dict[str, CharRange] = {}
    at = 0
    for marker, literal in pieces:
        if marker:
            text = texts[marker]
            # Templates trim texts; whichever way must let the literal after it follow at once.
            for shown in dict.fromkeys((text, text.strip(), text.rstrip(), text.lstrip())):
                if prompt.startswith(shown, at) and prompt.startswith(literal, at + len(shown)):
                    found[marker] = (at, at + len(shown))
                    at += len(shown)
                    break
            else:
                raise SpanError("the chat template rewrites a message's text, so it cannot be located in the prompt")
        elif not prompt.startswith(literal):
            raise SpanError("the chat template depends on the messages' texts, so they cannot be located in the prompt")
        at += len(literal)
    if at != len(prompt):
        raise SpanError("the chat template depends on the messages' texts, so they cannot be located in the prompt")
    return found


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
    return [part for part in parts if part is not None]


def _whole(message: LocatedMessage) -> Sequence[CharRange | None]:
    return message.parts if message.joined is None else [message.joined]


def _nth(items: Sequence[T], index: int) -> list[T]:
    return [items[index]] if -len(items) <= index < len(items) else []


def to_tokens(ranges: Sequence[CharRange], offsets: Offsets) -> tuple[tuple[int, int], ...]:
    """Token ranges that touch the character ranges. offsets: each token's ``(start, end)`` characters, in order."""
    out: list[tuple[int, int]] = []
    for index, (start, end) in enumerate(offsets):
        if end > start and any(start < stop and end > begin for begin, stop in ranges):
            if out and out[-1][1] == index:
                out[-1] = (out[-1][0], index + 1)
            else:
                out.append((index, index + 1))
    return tuple(out)


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
    spec: MiaSpec, messages: Sequence[LocatedMessage] | SpanError, offsets: Offsets | None, prompt_len: int
) -> ResolvedSpec:
    """Resolve every span; captures on spans that cannot be found are left out with the reason, the rest stays."""
    resolved: dict[str, Span] = {}
    failed: dict[str, str] = {}
    for name, span in spec.spans.items():
        try:
            if isinstance(messages, SpanError) and not isinstance(span, TokenRanges):
                raise messages
            located = [] if isinstance(messages, SpanError) else messages
            resolved[name] = resolve(span, located, offsets, prompt_len)
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
    kinds = ("hidden", "probes", "attention", "qk")
    left = {kind: {name: one for name, one in getattr(spec, kind).items() if name not in unavailable} for kind in kinds}
    return ResolvedSpec(spec.model_copy(update={"spans": resolved, **left}), unavailable)
