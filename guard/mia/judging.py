"""Entries for what runs after the forward pass: attention masses out of vLLM's key cache, and gates on readouts.

Owns how captures and gates become the words of ``ops.MassEntry`` and ``ops.GateEntry``, and where in a step's values
they look. Changes nothing but what a request's gates have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from guard.mia.buffers import TapBuffers
from guard.mia.control import Words, bits
from guard.mia.ops import FIRST_PART, LAST_PART, MASS_WORDS
from guard.mia.plan import RequestPlan, RowChunk
from guard.mia.probes import ProbeBank
from guard.mia.results import is_averaged
from guard.mia.sharding import HeadShard
from guard.mia.spec import AttentionCapture, Gate, MiaSpec, TokenRanges
from guard.mia.tracking import Tracked
from guard.mia.windows import merged

GateWords = tuple[int, ...]


def span_words(spec: MiaSpec, capture: AttentionCapture) -> list[int]:
    """For each span of a capture the number of its ranges, and these, apart and in order."""
    words: list[int] = []
    for span in capture.spans:
        ranges = spec.spans[span]
        assert isinstance(ranges, TokenRanges)
        pairs = merged(ranges)
        words += [len(pairs), *(edge for pair in pairs for edge in pair)]
    return words


def mass_entries(
    buffers: TapBuffers, shard: HeadShard, capture: AttentionCapture, chunk: RowChunk, block_row: int, spans: int
) -> Words:
    """``[length * heads that this rank has, words of one]``. ``spans``: where the words of the spans begin."""
    layers = {layer: number for number, layer in enumerate(sorted(buffers.query))}
    count = len(capture.spans)
    firsts, advances = [], []
    for column, (layer, head) in enumerate(capture.heads):
        shape, tap = buffers.attention_shapes[layer], buffers.query[layer]
        local = shard.query_head(head, shape.query_heads)
        if local is None:
            continue
        query, out = chunk.slots[layer] + tap.heads.index(local), chunk.mass + column * count
        key_head = local // shape.group
        firsts.append((query, layers[layer], key_head, block_row, chunk.start, spans, count, out))
        advances.append((len(tap.heads), 0, 0, 0, 1, 0, 0, len(capture.heads) * count))
    entries: Words = np.asarray(firsts, np.int32).reshape(-1, MASS_WORDS)
    if chunk.length > 1:
        steps = np.arange(chunk.length, dtype=np.int32)[:, None, None]
        advance = np.asarray(advances, np.int32).reshape(-1, MASS_WORDS)
        entries = (entries + steps * advance).reshape(-1, MASS_WORDS)
    return entries


def gates_on_masses(
    tracked: Tracked, capture: AttentionCapture, name: str, chunks: Sequence[RowChunk], one: RequestPlan, end: int
) -> Iterator[GateWords]:
    """Gates on an attention readout. Of one that is averaged every part is added up, and the last is judged.

    chunks: of this step; ``end``: the first token after it.
    """
    heads, spans, averaged = len(capture.heads), len(capture.spans), is_averaged(capture)
    total = sum(stop - start for start, stop in tracked.intervals[name]) if averaged else 0
    if averaged and one.prompt_ended and not chunks:
        chunks = [RowChunk(name, {}, 0, 0)]
    for i, place, gate in _gates_on(tracked, name):
        assert gate.span is not None
        column = capture.spans.index(gate.span)
        for k, chunk in enumerate(chunks):
            first = FIRST_PART if i not in tracked.judged else 0
            last = LAST_PART if averaged and one.prompt_ended and k == len(chunks) - 1 else 0
            values = (chunk.mass + column, chunk.length, heads * spans, heads, spans)
            yield (place, max(end, tracked.prompt_len), *values, *_threshold(gate), total, first | last)
            if averaged:
                tracked.judged.add(i)


def gates_on_probes(probes: ProbeBank, tracked: Tracked, one: RequestPlan) -> Iterator[GateWords]:
    """Gates on the first logit of a probe, at every token that it read in this step."""
    for name, capture in tracked.spec.probes.items():
        layer, column = probes.layers[capture.probe], probes.columns[capture.probe].start
        for _, place, gate in _gates_on(tracked, name):
            for chunk in one.rows:
                if chunk.capture == name:
                    values = (chunk.slots[layer] * probes.outputs + column, chunk.length, probes.outputs, 1, 1)
                    yield (place, max(tracked.seen, tracked.prompt_len), *values, *_threshold(gate), 0, 0)


def _gates_on(tracked: Tracked, readout: str) -> Iterator[tuple[int, int, Gate]]:
    """Steering, place in ``opened_at``, and gate, of those that look at one readout."""
    for i, place in tracked.gates.items():
        gate = tracked.spec.steer[i].gate
        if gate is not None and gate.readout == readout:
            yield i, place, gate


def _threshold(gate: Gate) -> tuple[int, int]:
    """By its bits, and whether the gate opens above it."""
    threshold = gate.above if gate.above is not None else gate.below
    return int(bits(np.asarray([threshold], np.float32))[0]), int(gate.above is not None)
