"""Prompts that are lists of texts of which many are looked at: where each of these ends up among the prompt's tokens.

Owns the way to name more texts than a spec has spans: a span of the aperture is up to 16 parts of a message, and comes
back as one range of tokens for each, as long as something stands between them. Nothing is assumed about the template.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from guard.mia.results import Readout, Readouts
from guard.mia.spec import Span

PARTS_PER_SPAN = 16
MAX_SPANS = 15
"""Of the 16 that a spec may have, one is left for whoever asks."""

MAX_TEXTS = PARTS_PER_SPAN * MAX_SPANS
"""Most texts that one prompt may have looked at."""

PREFIX = "texts."

TokenRange = tuple[int, int]


class UnreadableError(ValueError):
    """A model's reading that cannot be scored; the message says why, without any text of the prompt."""


def spans_of(parts: Sequence[int]) -> dict[str, Span]:
    """Spans for a ``MiaSpec`` that find these parts of the only user message. Raises ``ValueError`` for too many."""
    if not 1 <= len(parts) <= MAX_TEXTS:
        raise ValueError(f"there are {len(parts)} texts; between 1 and {MAX_TEXTS} can be looked at")
    return {
        f"{PREFIX}{at // PARTS_PER_SPAN}": tuple(part_span(part) for part in parts[at : at + PARTS_PER_SPAN])
        for at in range(0, len(parts), PARTS_PER_SPAN)
    }


def part_span(part: int) -> str:
    """The selector of one part of the only user message."""
    return f"user.part.{part}"


def ranges_of(readouts: Readouts, texts: int) -> list[TokenRange]:
    """Token ranges ``[start, end)`` of the texts that ``spans_of`` named, in order. Raises ``UnreadableError``."""
    found = [one for name in sorted_spans(readouts) for one in readouts.span_tokens[name]]
    if len(found) != texts:
        # A text that the template drops, or tokens that run from one text into the next.
        raise UnreadableError(f"{len(found)} of the {texts} texts can be told apart in the prompt's tokens")
    return found


def sorted_spans(readouts: Readouts) -> list[str]:
    names = [name for name in readouts.span_tokens if name.startswith(PREFIX)]
    return sorted(names, key=lambda name: int(name.removeprefix(PREFIX)))


@contextmanager
def naming(which: str) -> Iterator[None]:
    """Puts which of many could not be read before what an ``UnreadableError`` says."""
    try:
        yield
    except UnreadableError as error:
        raise UnreadableError(f"{which}: {error}") from None


def need_complete(item: Readout | None, name: str) -> None:
    """Raises ``UnreadableError`` for a readout that is not there or not complete."""
    if item is None or item.status != "complete":
        reason = "nothing came back" if item is None else f"{item.status} {item.reason}".strip()
        raise UnreadableError(f"the readout {name!r} is missing: {reason}")
