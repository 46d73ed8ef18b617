"""Gathered rows become readouts: hidden vectors, probe logits, attention on named spans, raw queries and keys.

Owns the formulas. Reads the taps after a step, as ``routing`` planned it; never touches vLLM or the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from guard.mia.buffers import AttentionShape, TapBuffers
from guard.mia.probes import Probe
from guard.mia.results import (
    AttentionReadout,
    AttentionRowsReadout,
    FloatArray,
    HiddenReadout,
    ProbeReadout,
    QKReadout,
    Readout,
    RowsReadout,
    Status,
    StepReading,
    is_averaged,
    join,
    not_complete,
)
from guard.mia.routing import CACHED, KeyChunk, Router, RowChunk, SteerChunk, StepPlan
from guard.mia.sharding import ALONE, HeadShard
from guard.mia.spec import (
    AttentionCapture,
    Capture,
    Head,
    MiaSpec,
    ProbeCapture,
    QKCapture,
    TokenRanges,
    generates,
)
from guard.mia.tracking import AttentionSum, KeyStore, Tracked

MAX_LOGITS_AT_ONCE = 2**24
"""Attention from many tokens is computed in blocks of so many logits: 64 MiB of float32."""


class Reader:
    """Reads the taps of one engine after each of its steps."""

    def __init__(
        self, router: Router, buffers: TapBuffers, probes: Mapping[str, Probe], shard: HeadShard = ALONE
    ) -> None:
        self._router = router
        self._buffers = buffers
        self._probes = probes
        self._shard = shard

    def read(self, plan: StepPlan) -> dict[str, StepReading]:
        """Collect what the step gathered; returns what can be sent now, by request."""
        requests = self._router.requests
        for key_chunk in plan.key_chunks:
            tracked = requests[key_chunk.request_id]
            if tracked.keys is not None:
                self._keep_keys(tracked, tracked.keys, key_chunk)
        parts = [
            (chunk, self._part_of(tracked, tracked.captures[chunk.capture], chunk))
            for chunk in plan.row_chunks
            if chunk.capture not in (tracked := requests[chunk.request_id]).failed
        ]
        self._shard.merge([array for _, part in parts for array in _to_merge(part)])
        for row_chunk, part in parts:
            self._keep_part(requests[row_chunk.request_id], row_chunk, part)
        for steer_chunk in plan.steer_chunks:
            self._keep_dose(requests[steer_chunk.request_id], steer_chunk)
        readings = {}
        for request_id in plan.sampled:
            tracked = requests[request_id]
            reading = StepReading(
                prompt=self._prompt(tracked, ended) if (ended := plan.prompts_ended.get(request_id)) else None,
                grown={
                    name: self._part(tracked, name, capture)
                    for name, capture in tracked.captures.items()
                    if generates(capture) and self._has_news(tracked, name)
                },
                steering=tuple(tracked.steering),
            )
            if ended:
                self._router.release_prompt(tracked)
            tracked.told |= tracked.failed.keys()
            if reading:
                readings[request_id] = reading
        return readings

    def _keep_keys(self, tracked: Tracked, store: KeyStore, chunk: KeyChunk) -> None:
        """Move one chunk's keys from the taps into the request's store. Re-computed tokens overwrite themselves."""
        for layer, slot in chunk.slots.items():
            keys = store.keys[layer]
            gathered = self._buffers.key[layer].out[slot : slot + chunk.length]
            keys[chunk.start : chunk.start + chunk.length].copy_(gathered.view(chunk.length, *keys.shape[1:]))
        if chunk.start > store.filled:
            for name in (*tracked.spec.attention, *tracked.spec.qk):
                tracked.fail(name, CACHED)
        store.filled = max(store.filled, chunk.start + chunk.length)

    def _keep_part(self, tracked: Tracked, chunk: RowChunk, part: Readout) -> None:
        """Put a part to those of its capture, and let gates see it."""
        if isinstance(part, AttentionRowsReadout) and is_averaged(tracked.captures[chunk.capture]):
            _add(tracked.sums[chunk.capture], part)
        else:
            tracked.parts[chunk.capture].append(part)
            tracked.judge_gates(chunk.capture, part, chunk.next_token)

    def _part_of(self, tracked: Tracked, capture: Capture, chunk: RowChunk) -> Readout:
        """What one capture gathered: of attention and queries this rank's heads, of probes the first rank's logits, and
        zeros for the rest."""
        positions = tuple(range(chunk.start, chunk.start + chunk.length))
        if isinstance(capture, AttentionCapture):
            return self._attention_part(tracked, capture, chunk)
        if isinstance(capture, QKCapture):
            queries = {
                layer: self._queries_of(layer, slot, chunk.length, heads_at(capture.heads, layer))
                for layer, slot in chunk.slots.items()
            }
            return QKReadout("complete", capture.heads, positions, queries=queries)
        ((layer, slot),) = chunk.slots.items()
        rows = self._buffers.hidden[layer].out[slot : slot + chunk.length].float()
        if isinstance(capture, ProbeCapture):
            logits = self._probes[capture.probe].logits(rows).cpu().numpy()
            if self._shard.rank != 0:
                # The states are the same on every rank up to the last bit, on which a gate must not depend.
                logits = np.zeros_like(logits)
            return ProbeReadout("complete", capture.probe, positions, logits=logits)
        return RowsReadout("complete", layer, positions, values=rows.cpu().numpy().copy())

    def _queries_of(self, layer: int, slot: int, length: int, heads: list[int]) -> FloatArray:
        """``[length, len(heads), head_size]`` float32, zero for heads of other ranks."""
        shape = self._buffers.attention_shapes[layer]
        here = [(column, local) for column, local in enumerate(self._local(heads, shape)) if local is not None]
        out = np.zeros((length, len(heads), shape.head_size), np.float32)
        rows = self._queries(layer, slot, length).cpu().numpy()
        out[:, [column for column, _ in here]] = rows[:, [local for _, local in here]]
        return out

    def _local(self, heads: list[int], shape: AttentionShape) -> list[int | None]:
        return [self._shard.query_head(head, shape) for head in heads]

    def _queries(self, layer: int, slot: int, length: int) -> torch.Tensor:
        """``[length, query heads of this rank, head_size]`` float32."""
        shape = self._buffers.attention_shapes[layer]
        rows = self._buffers.query[layer].out[slot : slot + length]
        return rows.view(length, shape.query_heads, shape.head_size).float()

    def _attention_part(self, tracked: Tracked, capture: AttentionCapture, chunk: RowChunk) -> AttentionRowsReadout:
        """Attention from a chunk's tokens. With ``weights``: ``[tokens, heads, tokens up to the last of them]``."""
        assert tracked.keys is not None
        end = chunk.start + chunk.length
        masks = {span: _mask(tracked.spec, span, end) for span in capture.spans}
        mass = {span: np.zeros((chunk.length, len(capture.heads)), np.float32) for span in capture.spans}
        weights = np.zeros((chunk.length, len(capture.heads), end), np.float32) if capture.weights else None
        for layer, slot in chunk.slots.items():
            shape = self._buffers.attention_shapes[layer]
            places = [i for i, (at, _) in enumerate(capture.heads) if at == layer]
            local = self._local([capture.heads[i][1] for i in places], shape)
            queries = self._queries(layer, slot, chunk.length).cpu()
            by_key_head: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for column, head in zip(places, local, strict=True):
                if head is not None:
                    by_key_head[head // shape.group].append((column, head))
            for key_head, pairs in by_key_head.items():
                columns, heads = [column for column, _ in pairs], [head for _, head in pairs]
                keys = tracked.keys.keys[layer][:end, key_head]
                block = max(1, MAX_LOGITS_AT_ONCE // (len(heads) * end))
                for first in range(0, chunk.length, block):
                    some = queries[first : first + block, heads]
                    rows = attention_weights(some, keys, chunk.start + first, shape)
                    for span, mask in masks.items():
                        mass[span][first : first + block, columns] = rows[:, :, mask].sum(dim=2).numpy()
                    if weights is not None:
                        weights[first : first + block, columns] = rows.numpy()
        positions = tuple(range(chunk.start, end))
        return AttentionRowsReadout("complete", capture.heads, positions, mass=mass, weights=weights)

    def _keep_dose(self, tracked: Tracked, chunk: SteerChunk) -> None:
        tap = self._buffers.steer[chunk.layer]
        doses = tap.doses[chunk.fresh : chunk.end].cpu().numpy()
        if len(doses):
            # JSON has no word for what is beyond float32, or for what becomes of a stream that is.
            doses = np.nan_to_num(doses, nan=np.inf)
            doses = np.minimum(doses, np.finfo(np.float32).max)
            report = tracked.steering[chunk.index]
            tracked.steering[chunk.index] = replace(
                report,
                steered_tokens=report.steered_tokens + len(doses),
                relative_dose=max(report.relative_dose, float(doses.max())),
                limited_tokens=report.limited_tokens + int((doses > float(tap.dose_limit)).sum()),
            )

    def _prompt(self, tracked: Tracked, next_token: int) -> dict[str, Readout]:
        """All readouts of one request's prompt, which this step has read to its end. ``next_token``: after the step."""
        items: dict[str, Readout] = {}
        for name, capture in tracked.captures.items():
            if generates(capture):
                continue
            if is_averaged(capture) and name not in tracked.failed:
                assert isinstance(capture, AttentionCapture)
                item: Readout = _mean(tracked.sums.pop(name), capture, tracked.prompt_len)
                tracked.judge_gates(name, item, next_token)
            else:
                item = self._part(tracked, name, capture)
            single = isinstance(item, RowsReadout) and capture.positions == "last_prompt"
            items[name] = _single(item) if single and isinstance(item, RowsReadout) else item
        return items

    def _has_news(self, tracked: Tracked, name: str) -> bool:
        return bool(tracked.parts.get(name)) or (name in tracked.failed and name not in tracked.told)

    def _part(self, tracked: Tracked, name: str, capture: Capture) -> Readout:
        """What was gathered of one capture since it was last sent, or why there will be nothing."""
        if (reason := tracked.failed.get(name)) is not None:
            return not_complete(capture, _status_of(reason), reason)
        part: Readout = join(tracked.parts.pop(name))  # type: ignore[type-var]
        return self._with_keys(tracked, name, part) if isinstance(part, QKReadout) else part

    def _with_keys(self, tracked: Tracked, name: str, part: QKReadout) -> QKReadout:
        assert tracked.keys is not None
        keys, kv_heads = {}, {}
        sent = tracked.sent_keys[name]
        for layer in part.queries:
            shape = self._buffers.attention_shapes[layer]
            wanted = sorted({self._shard.key_head_of(head, shape) for head in heads_at(part.heads, layer)})
            rows = tracked.keys.keys[layer][sent : tracked.keys.filled].numpy()
            keys[layer] = np.zeros((len(rows), len(wanted), shape.head_size), np.float32)
            for column, head in enumerate(wanted):
                if (local := self._shard.owned_key_head(head, shape)) is not None:
                    keys[layer][:, column] = rows[:, local]
            kv_heads[layer] = tuple(wanted)
        self._shard.merge(list(keys.values()))
        tracked.sent_keys[name] = tracked.keys.filled
        shapes = {layer: self._buffers.attention_shapes[layer] for layer in part.queries}
        return replace(
            part,
            keys=keys,
            kv_heads=kv_heads,
            group={layer: shape.group * self._shard.replicas for layer, shape in shapes.items()},
            scale={layer: shape.scale for layer, shape in shapes.items()},
            softcap={layer: shape.softcap for layer, shape in shapes.items()},
            window={layer: shape.window for layer, shape in shapes.items()},
        )


def _to_merge(part: Readout) -> list[FloatArray]:
    """A part's arrays of which each rank has some."""
    if isinstance(part, ProbeReadout) and part.logits is not None:
        return [part.logits]
    if isinstance(part, QKReadout):
        return list(part.queries.values())
    if isinstance(part, AttentionRowsReadout):
        return [*part.mass.values(), *([] if part.weights is None else [part.weights])]
    return []


def heads_at(heads: tuple[Head, ...], layer: int) -> list[int]:
    """The heads of one layer, in the order asked."""
    return [head for at, head in heads if at == layer]


def _single(rows: RowsReadout) -> HiddenReadout:
    if rows.values is None:
        return HiddenReadout(rows.status, rows.layer, reason=rows.reason)
    return HiddenReadout("complete", rows.layer, rows.positions[0], None, rows.values[0])


def _status_of(reason: str) -> Status:
    return "unavailable" if reason == CACHED else "dropped"


def _add(total: AttentionSum, part: AttentionRowsReadout) -> None:
    total.positions += part.positions
    for span, mass in part.mass.items():
        total.mass[span] = total.mass.get(span, np.float32(0)) + mass.sum(axis=0)
    if part.weights is not None:
        added = part.weights.sum(axis=0)
        if total.weights is not None:
            added[:, : total.weights.shape[1]] += total.weights
        total.weights = added


def _mean(total: AttentionSum, capture: AttentionCapture, prompt_len: int) -> AttentionReadout:
    count = np.float32(len(total.positions))
    mass = {span: mass / count for span, mass in total.mass.items()}
    weights = None
    if total.weights is not None:
        weights = np.pad(total.weights / count, ((0, 0), (0, prompt_len - total.weights.shape[1])))
    return AttentionReadout("complete", capture.heads, tuple(total.positions), mass=mass, weights=weights)


def _mask(spec: MiaSpec, span: str, length: int) -> torch.Tensor:
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
    distance = torch.arange(first_position, first_position + len(queries))[:, None] - torch.arange(len(keys))
    hidden = distance < 0 if shape.window is None else (distance < 0) | (distance >= shape.window)
    return torch.softmax(logits.masked_fill(hidden[:, None], -torch.inf), dim=-1)
