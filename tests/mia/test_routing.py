"""Routing entries against a slow, obvious reference: one token at a time, over any sequence of batches."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from guard.mia.buffers import AttentionShape, StepLimits, TapBuffers
from guard.mia.engine_config import EngineConfig
from guard.mia.ops import LEAST_RELATIVE_NORM
from guard.mia.routing import CACHED, NO_ROWS, BatchView, Router, StepPlan
from guard.mia.spec import HiddenCapture, MiaSpec
from guard.mia.steering import Bank

LAYERS = (1, 2, 3)
VECTORS = ("a", "b")
HIDDEN_SIZE = 4
SHAPE = AttentionShape(query_heads=2, key_heads=1, head_size=4, scale=0.5, softcap=0.0, window=None)
CONFIG = EngineConfig(
    hidden_layers=LAYERS,
    attention_heads=tuple((layer, head) for layer in LAYERS for head in range(2)),
    max_hidden_rows_per_step=512,
    steering_layers=LAYERS,
    steering_vectors=VECTORS,
)


def make_router(max_host_bytes: int = 10**9, config: EngineConfig = CONFIG) -> tuple[Router, TapBuffers]:
    bank = torch.arange(len(VECTORS) * HIDDEN_SIZE, dtype=torch.float32).view(len(VECTORS), HIDDEN_SIZE) + 1
    buffers = TapBuffers.allocate(
        config, HIDDEN_SIZE, dict.fromkeys(LAYERS, SHAPE), StepLimits(8, 64), bank, torch.float32
    )
    return Router(buffers, Bank(VECTORS, bank), max_host_bytes), buffers


positions = st.sampled_from(["last_prompt", "prompt", "generated", "all", {"span": "s"}, {"tokens": [[0, 1], [0, 1]]}])
specs = st.builds(
    lambda hidden, heads, steer: MiaSpec.model_validate(
        {
            "spans": {"s": {"tokens": [[0, 1]]}},
            "hidden": {f"h{i}": {"layer": layer, "positions": where} for i, (layer, where) in enumerate(hidden)},
            "attention": {"a": {"heads": sorted(heads), "spans": ["s"]}} if heads else {},
            "steer": [
                {"vector": v, "layer": n, "coefficient": c, "phase": p, "positions": w, "method": m, "preserve_norm": k}
                | ({"target": 2.0} if m == "project" else {})
                for v, n, c, p, w, m, k in steer
            ],
        }
    ),
    st.lists(st.tuples(st.sampled_from(LAYERS), positions), max_size=3),
    st.sets(st.sampled_from(CONFIG.attention_heads), max_size=3),
    st.lists(
        st.tuples(
            st.sampled_from(VECTORS),
            st.sampled_from(LAYERS),
            st.sampled_from([0.0, 1.0, -2.5]),
            st.sampled_from(["prefill", "decode", "both"]),
            st.sampled_from(["all", "last", {"tokens": [[1, 3], [5, 20]]}]),
            st.sampled_from(["add_vector", "project", "ablate", "replace"]),
            st.booleans(),
        ),
        max_size=3,
    ),
)
requests = st.lists(st.tuples(st.none() | specs, st.integers(1, 9)), min_size=1, max_size=5)


def steered(
    stream: torch.Tensor, spec: MiaSpec, prompt_len: int, position: int, layer: int, bank: torch.Tensor
) -> torch.Tensor:
    """One token's stream after everything that its request asks for there, one thing after the other."""
    in_prompt = position < prompt_len
    for steer in spec.steer:
        in_ranges, is_last = position in {1, 2, *range(5, 20)}, position >= prompt_len - 1
        here = {"all": True, "last": is_last}[steer.positions] if isinstance(steer.positions, str) else in_ranges
        acts = steer.layer == layer and steer.phase in ("both", "prefill" if in_prompt else "decode") and here
        if not acts or steer.coefficient == 0.0:
            continue
        vector = bank[VECTORS.index(steer.vector)]
        unit = vector / vector.norm()
        after = {
            "add_vector": stream + steer.coefficient * vector,
            "project": stream + steer.coefficient * ((steer.target or 0.0) - stream @ unit) * unit,
            "ablate": stream - steer.coefficient * (stream @ unit) * unit,
            "replace": steer.coefficient * vector,
        }[steer.method]
        keeps = steer.preserve_norm and after.norm() > LEAST_RELATIVE_NORM * stream.norm()
        stream = after * stream.norm() / after.norm() if keeps else after
    return stream


def wanted_positions(capture: HiddenCapture, prompt_len: int, until: int) -> list[int]:
    """Every token below ``until`` that a capture reads, one by one."""
    if capture.positions == "last_prompt":
        return [p for p in range(until) if p == prompt_len - 1]
    if capture.positions == "prompt":
        return [p for p in range(until) if p < prompt_len]
    if capture.positions == "generated":
        return [p for p in range(until) if p >= prompt_len]
    return list(range(until)) if capture.positions == "all" else [p for p in range(until) if p == 0]


def view(batch: list[tuple[int, int]], computed: list[int], prompt_lens: list[int]) -> BatchView:
    starts = np.cumsum([0, *(n for _, n in batch)], dtype=np.int32)
    before = [computed[i] for i, _ in batch]
    samples = [computed[i] + n >= prompt_lens[i] for i, n in batch]
    return BatchView([f"r{i}" for i, _ in batch], starts, np.asarray(before, np.int32), np.asarray(samples))


REPLACED_THEN_ABLATED = MiaSpec.model_validate(
    {
        "steer": [
            {"vector": "a", "layer": 3, "coefficient": 1.0, "phase": "prefill", "method": "replace"},
            {
                "vector": "a",
                "layer": 3,
                "coefficient": 1.0,
                "phase": "prefill",
                "method": "ablate",
                "preserve_norm": True,
            },
        ]
    }
)
"""Nothing is left of the stream after it: what rounding leaves must not be blown up to the old norm."""


@settings(max_examples=150, deadline=None)
@example([(REPLACED_THEN_ABLATED, 1)], [[2, 0, 0, 0, 0]])
@given(requests, st.lists(st.lists(st.integers(0, 5), min_size=5, max_size=5), min_size=1, max_size=6))
def test_every_step_routes_what_a_walk_over_single_tokens_would(
    asked: list[tuple[MiaSpec | None, int]], steps: list[list[int]]
) -> None:
    router, buffers = make_router()
    bank = buffers.steer[1].bank
    generator = torch.Generator().manual_seed(0)
    prompt_lens = [prompt_len for _, prompt_len in asked]
    computed = [0] * len(asked)
    gathered: dict[tuple[int, str], list[int]] = defaultdict(list)
    ended: list[int] = []
    for i, (spec, prompt_len) in enumerate(asked):
        if spec is not None:
            router.add(f"r{i}", spec, prompt_len)
    for step in steps:
        batch = [(i, n) for i, n in enumerate(step[: len(asked)]) if n]
        if not batch:
            continue
        seen = view(batch, computed, prompt_lens)
        plan = router.fill(seen) or StepPlan()

        for layer in LAYERS:
            hidden, residual = torch.randn(2, int(seen.starts[-1]), HIDDEN_SIZE, generator=generator)
            reference = hidden + residual
            for k, (i, length) in enumerate(batch):
                spec, prompt_len = asked[i]
                for j in range(length if spec is not None else 0):
                    row = int(seen.starts[k]) + j
                    reference[row] = steered(reference[row], spec, prompt_len, computed[i] + j, layer, bank)
            tap = buffers.steer[layer]
            torch.ops.mia.steer_rows(
                hidden, residual, tap.rows, tap.slots, tap.modes, tap.coefficients, tap.targets, tap.keep_norm,
                tap.bounds, bank,
            )  # fmt: skip
            torch.testing.assert_close(hidden + residual, reference, rtol=1e-4, atol=1e-4)

        row_of = {
            (i, computed[i] + j): int(seen.starts[k]) + j for k, (i, length) in enumerate(batch) for j in range(length)
        }
        for chunk in plan.row_chunks:
            i = int(chunk.request_id[1:])
            for j in range(chunk.length):
                assert int(buffers.hidden[chunk.layer].rows[chunk.slot + j]) == row_of[i, chunk.start + j]
                gathered[i, chunk.capture].append(chunk.start + j)
        for key_chunk in plan.key_chunks:
            i = int(key_chunk.request_id[1:])
            assert key_chunk.start + key_chunk.length <= prompt_lens[i]
            for layer, slot in key_chunk.slots.items():
                rows = buffers.key[layer].rows[slot : slot + key_chunk.length].tolist()
                assert rows == [row_of[i, key_chunk.start + j] for j in range(key_chunk.length)]
        for request_id, slots in plan.prompts_ended.items():
            i = int(request_id[1:])
            ended.append(i)
            assert request_id in plan.sampled
            for layer, slot in slots.items():
                assert int(buffers.query[layer].rows[slot]) == row_of[i, prompt_lens[i] - 1]
        for i, length in batch:
            computed[i] += length

    for i, (spec, prompt_len) in enumerate(asked):
        asks = spec is not None and bool(spec.hidden or spec.attention)
        assert ended.count(i) == (1 if asks and computed[i] >= prompt_len else 0)
        for name, capture in spec.hidden.items() if spec is not None else ():
            assert gathered[i, name] == wanted_positions(capture, prompt_len, computed[i])


def test_tokens_computed_again_after_preemption_are_not_gathered_twice() -> None:
    router, _ = make_router()
    spec = MiaSpec.model_validate({"hidden": {"h": {"layer": 1, "positions": "all"}}})
    router.add("r0", spec, 4)
    positions = []
    for computed, length in ((0, 3), (0, 4), (4, 1), (0, 5), (5, 1)):
        plan = router.fill(view([(0, length)], [computed], [4]))
        positions += [chunk.start + j for chunk in plan.row_chunks for j in range(chunk.length)]
    assert positions == list(range(6))


def test_rows_that_the_prefix_cache_skipped_or_that_find_no_space_fail_their_capture_alone() -> None:
    router, _ = make_router()
    captures = {"all": {"layer": 1, "positions": "all"}, "last": {"layer": 1}}
    router.add("r0", MiaSpec.model_validate({"hidden": captures}), 6)
    plan = router.fill(view([(0, 2)], [4], [6]))
    assert router.requests["r0"].failed == {"all": CACHED}
    assert [chunk.capture for chunk in plan.row_chunks] == ["last"]

    config = CONFIG.model_copy(update={"max_hidden_rows_per_step": 3})
    router, _ = make_router(config=config)
    router.add("r0", MiaSpec.model_validate({"hidden": {"h": captures["all"]}}), 3)
    router.add("r1", MiaSpec.model_validate({"hidden": {"h": captures["all"]}}), 3)
    plan = router.fill(view([(0, 3), (1, 3)], [0, 0], [3, 3]))
    assert router.requests["r0"].failed == {}
    assert router.requests["r1"].failed == {"h": NO_ROWS}
    assert [chunk.request_id for chunk in plan.row_chunks] == ["r0"]


def test_a_step_in_which_nobody_asks_clears_the_entries_of_the_step_before() -> None:
    router, buffers = make_router()
    router.add("r0", MiaSpec.model_validate({"hidden": {"h": {"layer": 1}}}), 2)
    assert router.fill(view([(0, 2), (1, 3)], [0, 0], [2, 3])) is not None
    assert int(buffers.hidden[1].count) == 1
    assert router.fill(view([(1, 1)], [2, 3], [2, 3])) is None
    assert int(buffers.hidden[1].count) == 0


def test_keys_that_find_no_space_are_not_reserved_and_space_comes_back_when_a_request_ends() -> None:
    one_prompt_bytes = 4 * 4 * SHAPE.key_heads * SHAPE.head_size
    router, _ = make_router(max_host_bytes=one_prompt_bytes)
    spec = MiaSpec.model_validate(
        {"spans": {"s": {"tokens": [[0, 1]]}}, "attention": {"a": {"heads": [[1, 0]], "spans": ["s"]}}}
    )
    router.add("first", spec, 4)
    router.add("second", spec, 1)
    assert router.requests["first"].keys is not None
    assert router.requests["second"].keys is None
    router.remove("first")
    router.add("third", spec, 4)
    assert router.requests["third"].keys is not None


@pytest.mark.parametrize("count", [1, 3])
def test_adding_a_request_again_keeps_one_reservation(count: int) -> None:
    router, _ = make_router(max_host_bytes=4 * 4 * SHAPE.key_heads * SHAPE.head_size)
    spec = MiaSpec.model_validate(
        {"spans": {"s": {"tokens": [[0, 1]]}}, "attention": {"a": {"heads": [[1, 0]], "spans": ["s"]}}}
    )
    for _ in range(count):
        router.add("r", spec, 4)
        assert router.requests["r"].keys is not None
