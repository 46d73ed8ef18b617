"""Gathered rows become readouts: hidden vectors, and the attention mass of chosen heads on named spans.

Owns the formulas. Reads the taps after a step, as ``routing`` planned it; never touches vLLM or the batch.
"""

from __future__ import annotations

import torch

from guard.mia.buffers import AttentionShape, TapBuffers
from guard.mia.results import AttentionReadout, HiddenReadout, Readout
from guard.mia.routing import FinishedPrompt, KeyChunk, KeyStore, Router, StepPlan, Tracked
from guard.mia.spec import AttentionCapture, TokenRanges


def read_step(router: Router, buffers: TapBuffers, plan: StepPlan) -> dict[str, dict[str, Readout]]:
    """Readouts of every request whose prompt ended in this step, by request and capture name."""
    for chunk in plan.chunks:
        keep_keys(router.requests[chunk.request_id].keys, chunk, buffers)
    done = {}
    for request_id, finished in plan.finishing.items():
        tracked = router.requests[request_id]
        done[request_id] = read_prompt(tracked, finished, buffers)
        tracked.read = True
        router.release_keys(tracked)
    return done


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


def read_prompt(tracked: Tracked, finished: FinishedPrompt, buffers: TapBuffers) -> dict[str, Readout]:
    """All prompt readouts of one request; its last prompt token is in the taps where ``finished`` says."""
    position = tracked.prompt_len - 1
    items: dict[str, Readout] = {}
    for name, hidden in tracked.spec.hidden.items():
        row = buffers.hidden[hidden.layer].out[finished.hidden[hidden.layer]]
        items[name] = HiddenReadout(
            "complete", hidden.layer, position, tracked.prompt_ids[position], row.float().cpu().numpy().copy()
        )
    queries = {layer: buffers.query[layer].out[slot].float().cpu() for layer, slot in finished.query.items()}
    for name, attention in tracked.spec.attention.items():
        items[name] = _read_attention(attention, tracked, queries, buffers.attention_shapes)
    return items


def _read_attention(
    capture: AttentionCapture,
    tracked: Tracked,
    queries: dict[int, torch.Tensor],
    shapes: dict[int, AttentionShape],
) -> AttentionReadout:
    store = tracked.keys
    if store is None:
        return AttentionReadout("dropped", capture.heads, reason="no space for this prompt's keys (max_key_bytes)")
    if store.gap:
        return AttentionReadout("unavailable", capture.heads, reason="part of the prompt came from the prefix cache")
    weights = {layer: attention_weights(queries[layer], store.keys[layer], shapes[layer]) for layer, _ in capture.heads}
    rows = torch.stack([weights[layer][head] for layer, head in capture.heads])
    mass = {}
    for span in capture.spans:
        ranges = tracked.spec.spans[span]
        assert isinstance(ranges, TokenRanges)
        mass[span] = rows[:, _mask(ranges, tracked.prompt_len)].sum(dim=1).numpy()
    return AttentionReadout("complete", capture.heads, tracked.prompt_len - 1, mass)


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
