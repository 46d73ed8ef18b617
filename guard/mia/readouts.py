"""What a step has gathered becomes values, on the device: probe logits, attention on named spans, raw queries and keys.

Owns the formulas and the copies to the host. Reads the pools after a step, as ``routing`` planned it; never waits for
the device, never touches vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from guard.mia import ops as _ops  # noqa: F401  (registers torch.ops.mia)
from guard.mia.buffers import AttentionShape, TapBuffers
from guard.mia.control import Control
from guard.mia.plan import RequestPlan, RowChunk, StepPlan
from guard.mia.probes import ProbeBank
from guard.mia.record import Rows, StepCopies
from guard.mia.results import QKReadout, is_averaged
from guard.mia.routing import Router
from guard.mia.row_ring import RowRing
from guard.mia.sharding import ALONE, HeadShard
from guard.mia.spec import AttentionCapture, Head, MiaSpec, QKCapture, TokenRanges
from guard.mia.tracking import Tracked

MAX_LOGITS_AT_ONCE = 2**24
"""Attention from many tokens is computed in blocks of so many logits: 64 MiB of float32."""


LARGEST_ENTRY_WORDS = 16
"""A block of so many words is a header of two taps and an entry of any of them."""

SIDE_BYTES = 2**18
"""A copy of less is made sooner than another stream is told to make it."""

NOTHING = torch.zeros(0)
"""What a record has in place of a copy, where there is nothing to copy."""

Tensors = dict[int, torch.Tensor]
"""By layer."""


class KeySource(Protocol):
    """Where a request's keys are."""

    def keys(self, tracked: Tracked, one: RequestPlan, layer: int, start: int, end: int) -> torch.Tensor:
        """Those of tokens ``start:end`` at one layer: ``[tokens, key heads of this rank, head_size]`` float32."""

    def masses(self, entries: int, tables: torch.Tensor, values: torch.Tensor) -> bool:
        """Write the attention masses of a step's entries into ``values``; False when that is left to the formula."""


@dataclass(frozen=True)
class GatheredKeys:
    """Keys that went through taps into stores on the host."""

    buffers: TapBuffers

    def keys(self, tracked: Tracked, one: RequestPlan, layer: int, start: int, end: int) -> torch.Tensor:
        assert tracked.keys is not None
        return tracked.keys.keys[layer][start:end]

    def masses(self, entries: int, tables: torch.Tensor, values: torch.Tensor) -> bool:
        return False

    def keep(self, plan: StepPlan) -> None:
        """Move a step's keys from the taps into the stores. Tokens computed again overwrite themselves."""
        for chunk in plan.key_chunks:
            for layer, slot in chunk.slots.items():
                keys = chunk.store.keys[layer]
                gathered = self.buffers.key[layer].out[slot : slot + chunk.length]
                keys[chunk.start : chunk.start + chunk.length].copy_(gathered.view(chunk.length, *keys.shape[1:]))


class Reader:
    """Reads the pools of one engine after each of its steps."""

    def __init__(
        self,
        router: Router,
        buffers: TapBuffers,
        probes: ProbeBank,
        ring: RowRing,
        shard: HeadShard = ALONE,
        keys: KeySource | None = None,
    ) -> None:
        self._router = router
        self._buffers = buffers
        self._probes = probes
        self._shard = shard
        self._ring = ring
        self._gathered = GatheredKeys(buffers)
        # CUDA alone has streams; a CPU's copies are made where they are asked for.
        self._side = torch.cuda.Stream() if buffers.hidden_pool.is_cuda else None  # type: ignore[no-untyped-call]
        self._rows_sent: torch.cuda.Event | None = None
        self._control: Control | None = None
        self.keys: KeySource = keys or self._gathered

    def read(self, plan: StepPlan) -> StepCopies | None:
        """Every rank calls it; the first one gets the copies."""
        self._gathered.keep(plan)
        values, heads = self._values(plan) if plan.values else (NOTHING, _Heads())
        if self._shard.rank != 0:
            return None
        buffers = self._buffers
        hidden, ready = self._send_rows(buffers.hidden_pool[slice(*plan.layout.sent)])
        return StepCopies(
            plan.layout,
            plan.offset,
            hidden=hidden,
            values=to_host(values) if plan.values else NOTHING,
            doses=to_host(buffers.doses[: plan.doses]) if plan.doses else NOTHING,
            opened_at=to_host(buffers.opened_at) if plan.gated else NOTHING,
            weights={part: to_host(rows) for part, rows in heads.weights.items()},
            queries={part: self._qk_readout(part, *both) for part, both in heads.queries.items()},
            ready=ready,
        )

    def before_forward(self) -> None:
        """The pool is about to be written to again."""
        if self._rows_sent is not None:
            torch.cuda.current_stream().wait_event(self._rows_sent)
            self._rows_sent = None

    def warm_up(self) -> None:
        """Have compiled what runs outside the forward pass, before the first request would wait for it: one entry of
        each, which names no span and no row, so that nothing is written."""
        if not self._buffers.hidden_pool.is_cuda:
            return
        nothing = torch.zeros(LARGEST_ENTRY_WORDS, dtype=torch.int32, device=self._buffers.bank.device)
        values = torch.zeros(1, device=nothing.device)
        if self.keys is not self._gathered:
            self.keys.masses(1, nothing, values)
        if len(self._buffers.opened_at):
            torch.ops.mia.judge_gates(values, nothing, 1, 1, self._buffers.opened_at, self._buffers.sums)

    def _send_rows(self, rows: torch.Tensor) -> tuple[int | None, torch.cuda.Event | None]:
        """Into the ring: the place there, and when they have arrived, unless that is when the stream gets there. Many
        bytes go beside the sampler and the next step's first layers, and not before them."""
        if not len(rows):
            return None, None
        if self._side is None or rows.nbytes < SIDE_BYTES:
            return self._ring.put(rows), None
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            place = self._ring.put(rows)
        self._rows_sent = self._side.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        return place, self._rows_sent

    def _values(self, plan: StepPlan) -> tuple[torch.Tensor, _Heads]:
        """Logits of probes and masses of attention, on every rank those of all, and what gates make of them."""
        layout, pool = plan.layout, self._buffers.hidden_pool
        values = torch.zeros(layout.logits + plan.masses, device=pool.device)
        tables = self._tables(plan)
        if layout.logits and self._shard.rank == 0:
            # The states are the same on every rank up to the last bit, on which a gate must not depend.
            slots = layout.logits // layout.outputs
            values[: layout.logits] = self._probes.logits(pool[:slots]).view(-1)
        heads = self._read_heads(plan, tables, values)
        self._shard.merge([values, *heads.tensors()])
        if tables.gates:
            opened_at, sums = self._buffers.opened_at, self._buffers.sums
            torch.ops.mia.judge_gates(values, tables.control, 1, tables.gates, opened_at, sums)
        return values, heads

    def _tables(self, plan: StepPlan) -> _Tables:
        """Of a step without masses and gates the block of the forward pass stands in, which nobody reads."""
        none = np.zeros((0, 1), np.int32)
        masses = np.concatenate(plan.mass_entries) if plan.mass_entries else none
        gates = np.asarray(plan.gate_entries, np.int32) if plan.gate_entries else none
        if not (len(masses) or len(gates)):
            return _Tables(self._buffers.control.tensor, 0, 0)
        if len(gates):
            gates[:, 1] += plan.offset
        words = masses.size + gates.size + len(plan.span_words)
        if self._control is None or self._control.entry_words < words:
            self._control = Control(2, 2 * words, self._buffers.bank.device)
        tables = self._control
        tables.begin()
        begin = tables.append(np.asarray(plan.span_words, np.int32))
        if len(masses):
            masses[:, 5] += begin
            tables.put(0, masses)
        tables.put(1, gates)
        tables.upload()
        return _Tables(tables.tensor, len(masses), len(gates))

    def _read_heads(self, plan: StepPlan, tables: _Tables, values: torch.Tensor) -> _Heads:
        """Attention and queries, of this rank's heads; zeros for the others."""
        heads = _Heads()
        by_kernel = tables.masses > 0 and self.keys.masses(tables.masses, tables.control, values)
        for request_id, chunk in plan.head_chunks:
            tracked, one = self._router.requests[request_id], plan.layout.requests[request_id]
            capture, part = tracked.captures[chunk.capture], (request_id, chunk.capture, chunk.start)
            if isinstance(capture, QKCapture):
                keys = self._keys_of(tracked, one, capture, chunk)
                heads.queries[part] = self._queries_of(capture, chunk), keys
            elif isinstance(capture, AttentionCapture) and (capture.weights or not by_kernel):
                masses = None if by_kernel else values[plan.layout.logits + chunk.mass :]
                rows = self._attention(tracked, one, capture, chunk, masses)
                if rows is not None:
                    heads.weights[part] = rows
        return heads

    def _queries(self, layer: int, slot: int, length: int) -> torch.Tensor:
        """``[length, configured heads of this rank, head_size]`` float32."""
        tap = self._buffers.query[layer]
        width = len(tap.heads)
        return tap.out[slot : slot + length * width].view(length, width, -1).float()

    def _columns(self, heads: list[Head], layer: int) -> list[tuple[int, int]]:
        """Of a capture's heads those of one layer that this rank has: their column and their number here."""
        count = self._buffers.attention_shapes[layer].query_heads
        local = [
            (column, self._shard.query_head(head, count)) for column, (at, head) in enumerate(heads) if at == layer
        ]
        return [(column, head) for column, head in local if head is not None]

    def _attention(
        self,
        tracked: Tracked,
        one: RequestPlan,
        capture: AttentionCapture,
        chunk: RowChunk,
        masses: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Attention from a chunk's tokens: its masses into ``masses``, and if asked for ``[tokens, heads, tokens up to
        the last]``; of a capture that is averaged the sum over the first, ``[1, heads, tokens up to the last]``."""
        end, heads = chunk.start + chunk.length, list(capture.heads)
        device = self._buffers.query_pool.device
        mass = torch.zeros(chunk.length, len(heads), len(capture.spans), device=device)
        # A row for each token of a long span would be many times the size of everything else here.
        summed = is_averaged(capture)
        rows_kept = 1 if summed else chunk.length
        weights = torch.zeros(rows_kept, len(heads), end, device=device) if capture.weights else None
        masks = [span_mask(tracked.spec, span, end) for span in capture.spans]
        for layer, slot in chunk.slots.items():
            shape, tap = self._buffers.attention_shapes[layer], self._buffers.query[layer]
            by_key_head: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for column, head in self._columns(heads, layer):
                by_key_head[head // shape.group].append((column, tap.heads.index(head)))
            if not by_key_head:
                continue
            keys = self.keys.keys(tracked, one, layer, 0, end)
            queries = self._queries(layer, slot, chunk.length).to(keys.device)
            for key_head, pairs in by_key_head.items():
                columns, places = [column for column, _ in pairs], [place for _, place in pairs]
                block = max(1, MAX_LOGITS_AT_ONCE // (len(places) * end))
                for first in range(0, chunk.length, block):
                    some = queries[first : first + block, places]
                    rows = attention_weights(some, keys[:, key_head], chunk.start + first, shape)
                    for span, mask in enumerate(masks):
                        mass[first : first + block, columns, span] = rows[:, :, mask.to(rows.device)].sum(2).to(device)
                    if weights is not None and summed:
                        weights[0, columns] += rows.sum(0).to(device)
                    elif weights is not None:
                        weights[first : first + block, columns] = rows.to(device)
        if masses is not None:
            masses[: mass.numel()] = mass.view(-1)
        return weights

    def _queries_of(self, capture: QKCapture, chunk: RowChunk) -> dict[int, torch.Tensor]:
        """By layer: ``[length, heads of the layer, head_size]`` float32, zero for heads of other ranks."""
        out = {}
        for layer in sorted({layer for layer, _ in capture.heads}):
            heads = [head for head in capture.heads if head[0] == layer]
            tap, shape = self._buffers.query[layer], self._buffers.attention_shapes[layer]
            out[layer] = torch.zeros(chunk.length, len(heads), shape.head_size, device=tap.out.device)
            if chunk.length and (here := self._columns(heads, layer)):
                places = [tap.heads.index(head) for _, head in here]
                rows = self._queries(layer, chunk.slots[layer], chunk.length)
                out[layer][:, [column for column, _ in here]] = rows[:, places]
        return out

    def _keys_of(
        self, tracked: Tracked, one: RequestPlan, capture: QKCapture, chunk: RowChunk
    ) -> dict[int, torch.Tensor]:
        """By layer: ``[tokens, key heads asked for, head_size]`` float32, zero for heads of other ranks."""
        out = {}
        for layer in sorted({layer for layer, _ in capture.heads}):
            shape, wanted = self._buffers.attention_shapes[layer], self._key_heads(capture, layer)
            start, end = chunk.keys
            device = self._buffers.query_pool.device
            out[layer] = torch.zeros(end - start, len(wanted), shape.head_size, device=device)
            here = [(column, self._shard.owned_key_head(head, shape.key_heads)) for column, head in enumerate(wanted)]
            owned = [(column, head) for column, head in here if head is not None]
            if end > start and owned:
                keys = self.keys.keys(tracked, one, layer, start, end)
                out[layer][:, [column for column, _ in owned]] = keys[:, [head for _, head in owned]].to(device)
                if shape.window is not None:
                    # No query of this step or a later one sees them, and the cache may have given them away.
                    out[layer][: max(0, chunk.keys_from - shape.window + 1 - start)] = 0.0
        return out

    def _key_heads(self, capture: QKCapture, layer: int) -> tuple[int, ...]:
        """The key heads, counted over all ranks, that a capture's heads of one layer look at."""
        group = self._buffers.attention_shapes[layer].group
        return tuple(sorted({self._shard.key_head_of(head, group) for at, head in capture.heads if at == layer}))

    def _qk_readout(self, part: Rows, queries: Tensors, keys: Tensors) -> QKReadout:
        request_id, name, start = part
        capture = self._router.requests[request_id].captures[name]
        assert isinstance(capture, QKCapture)
        shapes = {layer: self._buffers.attention_shapes[layer] for layer in queries}
        length = next(len(rows) for rows in queries.values())
        return QKReadout(
            "complete",
            capture.heads,
            tuple(range(start, start + length)),
            queries={layer: to_host(rows).numpy() for layer, rows in queries.items()},
            keys={layer: to_host(rows).numpy() for layer, rows in keys.items()},
            kv_heads={layer: self._key_heads(capture, layer) for layer in shapes},
            group={layer: shape.group * self._shard.replicas for layer, shape in shapes.items()},
            scale={layer: shape.scale for layer, shape in shapes.items()},
            softcap={layer: shape.softcap for layer, shape in shapes.items()},
            window={layer: shape.window for layer, shape in shapes.items()},
        )


@dataclass(frozen=True)
class _Tables:
    """What the ops outside the graph read: a block of its own, of so many masses (tap 0) and gates (tap 1)."""

    control: torch.Tensor
    masses: int
    gates: int


@dataclass
class _Heads:
    """A step's attention rows, and queries with their keys by layer."""

    weights: dict[Rows, torch.Tensor] = field(default_factory=dict)
    queries: dict[Rows, tuple[Tensors, Tensors]] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        both = [by_layer for pair in self.queries.values() for by_layer in pair]
        return [*self.weights.values(), *(tensor for by_layer in both for tensor in by_layer.values())]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which is complete once the stream has got there."""
    return tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.clone()


def span_mask(spec: MiaSpec, span: str, length: int) -> torch.Tensor:
    """Tokens inside any range of the span: overlapping ranges count a token once."""
    ranges = spec.spans[span]
    assert isinstance(ranges, TokenRanges)
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in ranges.tokens:
        mask[start:end] = True
    return mask


def attention_weights(
    queries: torch.Tensor, keys: torch.Tensor, first_position: int, shape: AttentionShape
) -> torch.Tensor:
    """Attention probabilities of consecutive tokens, for heads that share a key head.

    queries: ``[tokens, heads, head_size]`` float32, of the tokens from ``first_position`` on. keys: ``[all tokens up to
    the last of them, head_size]`` float32. Returns ``[tokens, heads, all tokens]``: softmax over t of ``softcap(scale *
    q.k_t)``, zero after the token itself and outside the window.
    """
    logits = torch.einsum("nhd,td->nht", queries, keys) * shape.scale
    if shape.softcap:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    positions = torch.arange(first_position, first_position + len(queries), device=keys.device)
    distance = positions[:, None] - torch.arange(len(keys), device=keys.device)
    hidden = distance < 0 if shape.window is None else (distance < 0) | (distance >= shape.window)
    return torch.softmax(logits.masked_fill(hidden[:, None], -torch.inf), dim=-1)
