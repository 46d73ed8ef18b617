"""Which of one request's tokens a capture reads or a steering changes, and where they lie in a step.

Owns the arithmetic of token ranges. Knows no batch, no tap and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from guard.mia.spec import (
    AttentionCapture,
    Capture,
    FirstGenerated,
    MiaSpec,
    QKCapture,
    SpanPositions,
    Steer,
    TokenRanges,
)

ENDLESS = 2**31


class Window(NamedTuple):
    """Tokens ``start:start + length`` of one request, in the step's rows from ``row`` on. False when empty."""

    row: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def clip(self, start: int, end: int) -> Window:
        """The part inside ``[start, end)``."""
        row, first, length = self
        last = first + length
        # A step clips a window for each capture of each request: comparisons take a third of what min and max do.
        begin, stop = start if start > first else first, end if end < last else last
        return Window(row + begin - first, begin, stop - begin if stop > begin else 0)

    def __bool__(self) -> bool:
        return self.length > 0


def merged(ranges: TokenRanges) -> list[tuple[int, int]]:
    """The same tokens in ranges that are in order and do not overlap."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(ranges.tokens):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def intervals(capture: Capture, spec: MiaSpec, prompt_len: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of the tokens that a capture reads, in order and apart. Spans of ``spec`` are resolved."""
    positions = capture.positions
    if isinstance(positions, SpanPositions):
        span = spec.spans[positions.span]
        assert isinstance(span, TokenRanges)
        positions = span
    if isinstance(positions, TokenRanges):
        yield from merged(positions)
    elif isinstance(positions, FirstGenerated):
        yield prompt_len, prompt_len + positions.generated
    elif positions == "last_prompt":
        yield prompt_len - 1, prompt_len
    elif positions == "prompt":
        yield 0, prompt_len
    else:
        yield prompt_len if positions == "generated" else 0, ENDLESS


def steered(steer: Steer, prompt_len: int, opened_at: int | None, rows: Window) -> list[Window]:
    """The step's windows that ``steer`` acts on, in order and apart. ``opened_at``: from where its gate lets it."""
    begin = prompt_len if steer.phase == "decode" else 0
    end = prompt_len if steer.phase == "prefill" else ENDLESS
    if steer.positions == "last":
        begin = max(begin, prompt_len - 1)
    if steer.gate is not None:
        begin = ENDLESS if opened_at is None else max(begin, opened_at)
    ranges = merged(steer.positions) if isinstance(steer.positions, TokenRanges) else [(0, ENDLESS)]
    clipped = (rows.clip(max(begin, first), min(end, last)) for first, last in ranges)
    return [window for window in clipped if window]


def reach(steer: Steer, prompt_len: int) -> list[Window]:
    """All windows that ``steer`` may ever act on, its gate open from the first. With a coefficient of zero there are
    none, which keeps the stream bit for bit."""
    return steered(steer, prompt_len, 0, Window(0, 0, ENDLESS)) if steer.coefficient != 0.0 else []


def first_steered(spec: MiaSpec, prompt_len: int) -> int | None:
    """The first token that a request's steering may change; None when it changes none."""
    return min((window.start for one in spec.steer for window in reach(one, prompt_len)), default=None)


def first_read(spec: MiaSpec, prompt_len: int, *, keys_from_cache: bool) -> int | None:
    """The first token of the prompt that a request must compute for its captures, and not take from a prefix cache:
    where it reads, and the very first for attention whose keys cannot be read from that cache. None for the last one,
    which is always computed, and for those behind it."""
    starts = [start for capture in spec.captures.values() for start, _ in intervals(capture, spec, prompt_len)]
    if not keys_from_cache and any(isinstance(one, AttentionCapture | QKCapture) for one in spec.captures.values()):
        starts.append(0)
    first = min(starts, default=prompt_len)
    return first if first < prompt_len - 1 else None
