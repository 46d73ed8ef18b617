"""Gathered rows become readouts: hidden vectors, and the attention mass of chosen heads on named spans.

Owns the formulas. Reads the taps after a step, as ``routing`` planned it; never touches vLLM or the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from guard.mia.buffers import AttentionShape, TapBuffers
from guard.mia.results import AttentionReadout, HiddenReadout, Readout, RowsReadout, Status
from guard.mia.routing import CACHED, KeyChunk, KeyStore, Router, RowChunk, Rows, StepPlan, Tracked
from guard.mia.spec import AttentionCapture, HiddenCapture, TokenRanges


@dataclass
class StepReading:
    """What one request gives after one step.

    ``prompt``: readouts of the prompt, in the step in which it ended, else None. ``grown``: new rows of the captures
    that go on while the answer is generated; they are put together at the answer's end.
    """

    prompt: dict[str, Readout] | None = None
    grown: dict[str, RowsReadout] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.prompt is not None or bool(self.grown)


def read_step(router: Router, buffers: TapBuffers, plan: StepPlan) -> dict[str, StepReading]:
    """Collect what the step gathered; returns what can be sent now, by request."""
    for key_chunk in plan.key_chunks:
        keep_keys(router.requests[key_chunk.request_id].keys, key_chunk, buffers)
    for row_chunk in plan.row_chunks:
        router.requests[row_chunk.request_id].rows[row_chunk.capture].append(_gathered_rows(row_chunk, buffers))
    readings: dict[str, StepReading] = {}
    for request_id in plan.sampled:
        tracked = router.requests[request_id]
        reading = StepReading(grown=_grown(tracked))
        if request_id in plan.prompts_ended:
            reading.prompt = read_prompt(tracked, plan.prompts_ended[request_id], buffers)
            router.release_prompt(tracked)
        if reading:
            readings[request_id] = reading
    return readings


def keep_keys(store: KeyStore | None, chunk: KeyChunk, buffers: TapBuffers) -> None:
    """Move one chunk's keys from the taps into the request's store. Re-computed tokens overwrite themselves."""
    assert store is not None
    for layer, slot in chunk.slots.items():
        keys = store.keys[layer]
        gathered = buffers.key[layer].out[slot : slot + chunk.length]
        keys[chunk.start : chunk.start + chunk.length].copy_(gathered.view(chunk.length, *keys.shape[1:]))
    if chunk.start > store.filled:
        store.gap = True
    store.filled = max(store.filled, chunk.start + chunk.length)


def _gathered_rows(chunk: RowChunk, buffers: TapBuffers) -> Rows:
    values = buffers.hidden[chunk.layer].out[chunk.slot : chunk.slot + chunk.length]
    positions = np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32)
    return Rows(positions, values.float().cpu().numpy().copy())


def _grown(tracked: Tracked) -> dict[str, RowsReadout]:
    """Rows of the captures that go on through the answer, gathered since the last output."""
    grown = {}
    for name, capture in tracked.spec.hidden.items():
        failed_untold = name in tracked.failed and name not in tracked.told
        if capture.generates and (failed_untold or tracked.rows.get(name)):
            grown[name] = _rows_readout(tracked, name, capture)
            tracked.rows.pop(name, None)
            tracked.told |= {name} & tracked.failed.keys()
    return grown


def read_prompt(tracked: Tracked, query_slots: dict[int, int], buffers: TapBuffers) -> dict[str, Readout]:
    """All readouts of one request's prompt; its last token's queries are in the taps where ``query_slots`` says."""
    items: dict[str, Readout] = {}
    for name, hidden in tracked.spec.hidden.items():
        if not hidden.generates:
            rows = _rows_readout(tracked, name, hidden)
            items[name] = _single(rows) if hidden.positions == "last_prompt" else rows
            tracked.rows.pop(name, None)
    queries = {layer: buffers.query[layer].out[slot].float().cpu() for layer, slot in query_slots.items()}
    for name, attention in tracked.spec.attention.items():
        items[name] = _read_attention(name, attention, tracked, queries, buffers.attention_shapes)
    return items


def _rows_readout(tracked: Tracked, name: str, capture: HiddenCapture) -> RowsReadout:
    if (reason := tracked.failed.get(name)) is not None:
        return RowsReadout(_status_of(reason), capture.layer, reason=reason)
    chunks = tracked.rows[name]
    return RowsReadout(
        "complete",
        capture.layer,
        tuple(int(position) for chunk in chunks for position in chunk.positions),
        (),
        np.concatenate([chunk.values for chunk in chunks]),
    )


def _single(rows: RowsReadout) -> HiddenReadout:
    if rows.values is None:
        return HiddenReadout(rows.status, rows.layer, reason=rows.reason)
    return HiddenReadout(rows.status, rows.layer, rows.positions[0], None, rows.values[0])


def _status_of(reason: str) -> Status:
    return "unavailable" if reason == CACHED else "dropped"


def _read_attention(
    name: str,
    capture: AttentionCapture,
    tracked: Tracked,
    queries: dict[int, torch.Tensor],
    shapes: dict[int, AttentionShape],
) -> AttentionReadout:
    store = tracked.keys
    if store is None or store.gap:
        reason = CACHED if store is not None else tracked.failed[name]
        return AttentionReadout(_status_of(reason), capture.heads, reason=reason)
    weights = {layer: attention_weights(queries[layer], store.keys[layer], shapes[layer]) for layer, _ in capture.heads}
    rows = torch.stack([weights[layer][head] for layer, head in capture.heads])
    mass = {}
    for span in capture.spans:
        ranges = tracked.spec.spans[span]
        assert isinstance(ranges, TokenRanges)
        mass[span] = rows[:, _mask(ranges, tracked.prompt_len)].sum(dim=1).numpy()
    whole = rows.numpy().copy() if capture.weights else None
    return AttentionReadout("complete", capture.heads, tracked.prompt_len - 1, mass, weights=whole)


def _mask(ranges: TokenRanges, length: int) -> torch.Tensor:
    """Tokens inside any of ``ranges``: overlapping ranges count a token once."""
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in ranges.tokens:
        mask[start:end] = True
    return mask


def attention_weights(query: torch.Tensor, keys: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Attention probabilities of the last token over the whole prompt, for every head.

    query: ``[query_heads * head_size]`` float32. keys: ``[prompt_len, key_heads, head_size]`` float32.
    Returns ``[query_heads, prompt_len]``: softmax over t of ``softcap(scale * q.k_t)``, zero outside the window.
    """
    grouped = query.view(shape.key_heads, shape.group, shape.head_size)
    logits = torch.einsum("kgd,tkd->kgt", grouped, keys).reshape(shape.query_heads, -1) * shape.scale
    if shape.softcap:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    if shape.window is not None and shape.window < logits.shape[1]:
        logits[:, : logits.shape[1] - shape.window] = -torch.inf
    return torch.softmax(logits, dim=-1)
