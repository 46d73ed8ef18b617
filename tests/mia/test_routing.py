"""Routing entries against a slow, obvious reference: one token at a time, over any sequence of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.mia.buffers import AttentionShape, StepLimits, TapBuffers
from guard.mia.engine_config import EngineConfig
from guard.mia.routing import BatchView, Router
from guard.mia.spec import MiaSpec

LAYERS = (1, 2, 3)
VECTORS = ("a", "b")
HIDDEN_SIZE = 4
SHAPE = AttentionShape(query_heads=2, key_heads=1, head_size=4, scale=0.5, softcap=0.0, window=None)
CONFIG = EngineConfig(
    hidden_layers=LAYERS,
    attention_heads=tuple((layer, head) for layer in LAYERS for head in range(2)),
    steering_layers=LAYERS,
    steering_vectors=VECTORS,
)


def make_router(max_key_bytes: int = 10**9) -> tuple[Router, TapBuffers]:
    bank = torch.arange(len(VECTORS) * HIDDEN_SIZE, dtype=torch.float32).view(len(VECTORS), HIDDEN_SIZE) + 1
    buffers = TapBuffers.allocate(
        CONFIG, HIDDEN_SIZE, dict.fromkeys(LAYERS, SHAPE), StepLimits(8, 64), bank, torch.float32
    )
    return Router(buffers, {name: i for i, name in enumerate(VECTORS)}, max_key_bytes), buffers


specs = st.builds(
    lambda hidden, heads, steer: MiaSpec.model_validate(
        {
            "spans": {"s": {"tokens": [[0, 1]]}},
            "hidden": {f"h{layer}": {"layer": layer} for layer in hidden},
            "attention": {"a": {"heads": sorted(heads), "spans": ["s"]}} if heads else {},
            "steer": [{"vector": v, "layer": n, "coefficient": c, "phase": p} for v, n, c, p in steer],
        }
    ),
    st.sets(st.sampled_from(LAYERS)),
    st.sets(st.sampled_from(CONFIG.attention_heads), max_size=3),
    st.lists(
        st.tuples(
            st.sampled_from(VECTORS),
            st.sampled_from(LAYERS),
            st.sampled_from([0.0, 1.0, -2.5]),
            st.sampled_from(["prefill", "decode", "both"]),
        ),
        max_size=3,
    ),
)
requests = st.lists(st.tuples(st.none() | specs, st.integers(1, 9)), min_size=1, max_size=5)


def expected_delta(spec: MiaSpec, prompt_len: int, position: int, layer: int, bank: torch.Tensor) -> torch.Tensor:
    delta = torch.zeros(HIDDEN_SIZE)
    for steer in spec.steer:
        in_prompt = position < prompt_len
        if steer.layer == layer and steer.phase in ("both", "prefill" if in_prompt else "decode"):
            delta += steer.coefficient * bank[VECTORS.index(steer.vector)]
    return delta


@settings(max_examples=150, deadline=None)
@given(requests, st.lists(st.lists(st.integers(0, 5), min_size=5, max_size=5), min_size=1, max_size=6))
def test_every_step_routes_what_a_walk_over_single_tokens_would(
    asked: list[tuple[MiaSpec | None, int]], steps: list[list[int]]
) -> None:
    router, buffers = make_router()
    bank = buffers.steer[1].bank
    computed = [0] * len(asked)
    read: set[int] = set()
    for i, (spec, prompt_len) in enumerate(asked):
        if spec is not None:
            router.add(f"r{i}", spec, list(range(prompt_len)))
    for step in steps:
        batch = [(i, n) for i, n in enumerate(step[: len(asked)]) if n]
        if not batch:
            continue
        starts = np.cumsum([0, *(n for _, n in batch)], dtype=np.int32)
        view = BatchView([f"r{i}" for i, _ in batch], starts, np.asarray([computed[i] for i, _ in batch], np.int32))
        plan = router.fill(view)

        for layer in LAYERS:
            stream = torch.zeros(int(starts[-1]), HIDDEN_SIZE)
            tap = buffers.steer[layer]
            n = int(tap.count)
            stream.index_add_(0, tap.rows[:n], bank[tap.slots[:n]] * tap.coefficients[:n, None])
            reference = torch.zeros_like(stream)
            for k, (i, length) in enumerate(batch):
                spec, prompt_len = asked[i]
                for j in range(length if spec is not None else 0):
                    reference[starts[k] + j] = expected_delta(spec, prompt_len, computed[i] + j, layer, bank)
            torch.testing.assert_close(stream, reference)

        for k, (i, length) in enumerate(batch):
            spec, prompt_len = asked[i]
            last = prompt_len - 1
            ends_here = computed[i] <= last < computed[i] + length
            wants = spec is not None and bool(spec.hidden or spec.attention)
            assert (plan is not None and f"r{i}" in plan.finishing) == (wants and ends_here and i not in read)
            if wants and ends_here and i not in read:
                row = int(starts[k]) + last - computed[i]
                finished = plan.finishing[f"r{i}"]
                for capture in spec.hidden.values():
                    assert int(buffers.hidden[capture.layer].rows[finished.hidden[capture.layer]]) == row
                for layer in {layer for a in spec.attention.values() for layer, _ in a.heads}:
                    assert int(buffers.query[layer].rows[finished.query[layer]]) == row
                read.add(i)
                router.requests[f"r{i}"].read = True
            for chunk in plan.chunks if plan else []:
                if chunk.request_id == f"r{i}":
                    for layer, slot in chunk.slots.items():
                        rows = buffers.key[layer].rows[slot : slot + chunk.length].tolist()
                        assert rows == [int(starts[k]) + j for j in range(chunk.length)]
                    assert chunk.start == computed[i]
                    assert chunk.start + chunk.length <= prompt_len
            computed[i] += length


def view_of(**lengths: int) -> BatchView:
    return BatchView(list(lengths), np.cumsum([0, *lengths.values()], dtype=np.int32), np.zeros(len(lengths), np.int32))


def test_a_step_in_which_nobody_asks_clears_the_entries_of_the_step_before() -> None:
    router, buffers = make_router()
    router.add("a", MiaSpec.model_validate({"hidden": {"h": {"layer": 1}}}), [1, 2])
    assert router.fill(view_of(a=2, b=3)) is not None
    assert int(buffers.hidden[1].count) == 1
    assert router.fill(view_of(b=1)) is None
    assert int(buffers.hidden[1].count) == 0


def test_keys_that_find_no_space_are_not_reserved_and_space_comes_back_when_a_request_ends() -> None:
    one_prompt_bytes = 4 * 4 * SHAPE.key_heads * SHAPE.head_size
    router, _ = make_router(max_key_bytes=one_prompt_bytes)
    spec = MiaSpec.model_validate(
        {"spans": {"s": {"tokens": [[0, 1]]}}, "attention": {"a": {"heads": [[1, 0]], "spans": ["s"]}}}
    )
    router.add("first", spec, [1, 2, 3, 4])
    router.add("second", spec, [1])
    assert router.requests["first"].keys is not None
    assert router.requests["second"].keys is None
    router.remove("first")
    router.add("third", spec, [1, 2, 3, 4])
    assert router.requests["third"].keys is not None


@pytest.mark.parametrize("count", [1, 3])
def test_adding_a_request_again_keeps_one_reservation(count: int) -> None:
    router, _ = make_router(max_key_bytes=4 * 4 * SHAPE.key_heads * SHAPE.head_size)
    spec = MiaSpec.model_validate(
        {"spans": {"s": {"tokens": [[0, 1]]}}, "attention": {"a": {"heads": [[1, 0]], "spans": ["s"]}}}
    )
    for _ in range(count):
        router.add("r", spec, [1, 2, 3, 4])
        assert router.requests["r"].keys is not None
