"""Sizes that are said before anything is allocated are those of what is allocated, and what cannot fit is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.mia import ops, sizing
from guard.mia.buffers import AttentionShape, TapBuffers
from guard.mia.engine_config import EngineConfig
from guard.mia.sharding import ALONE
from guard.mia.sizing import BuffersTooLargeError, LayerHeads, Sizing, StepLimits, in_units

SHAPES = {1: AttentionShape(4, 2, 8, 0.5, 0.0, None), 3: AttentionShape(4, 1, 16, 0.5, 0.0, 4)}
LAYERS = st.sets(st.integers(0, 4), max_size=3).map(lambda layers: tuple(sorted(layers)))
HEADS = st.sets(st.tuples(st.sampled_from(sorted(SHAPES)), st.integers(0, 3)), max_size=4).map(tuple)
ROWS = st.none() | st.integers(1, 9)


def allocate(
    config: EngineConfig, limits: StepLimits, dtype: torch.dtype = torch.float32, *, gathers_keys: bool = True
) -> TapBuffers:
    shapes = {layer: SHAPES[layer] for layer, _ in config.attention_heads}
    bank = torch.zeros(config.bank_capacity, 6)
    return TapBuffers.allocate(config, 6, shapes, limits, bank, dtype, ALONE, gathers_keys)


def a_sizing(config: EngineConfig, heads: dict[int, LayerHeads] | None = None, *, gathers_keys: bool = False) -> Sizing:
    """Of an engine with the sizes of an 8B model in bfloat16, at vLLM's limits on a large GPU."""
    return Sizing(config, StepLimits(1024, 8192), 4096, 2, heads or {}, gathers_keys)


@settings(max_examples=60, deadline=None)
@given(LAYERS, HEADS, LAYERS, ROWS, ROWS, st.integers(0, 3), st.booleans(), st.sampled_from(["float32", "bfloat16"]))
def test_the_sizes_said_are_those_allocated(
    hidden: tuple[int, ...],
    heads: tuple[tuple[int, int], ...],
    steering: tuple[int, ...],
    hidden_rows: int | None,
    query_rows: int | None,
    vectors: int,
    gathers_keys: bool,
    dtype: str,
) -> None:
    config = EngineConfig(
        hidden_layers=hidden,
        attention_heads=heads,
        steering_layers=steering,
        max_hidden_rows_per_step=hidden_rows,
        max_query_rows_per_step=query_rows,
        max_steering_vectors=vectors,
    )
    made = allocate(config, StepLimits(3, 5), getattr(torch, dtype), gathers_keys=gathers_keys)
    tensors = [made.control.tensor, made.hidden_pool, made.query_pool, made.bank, made.dose_limit, made.doses]
    tensors += [made.opened_at, made.sums, *(tap.out for tap in made.key.values())]
    assert sum(made.sizes_bytes().values()) == sum(tensor.nbytes for tensor in tensors)


def test_rows_for_as_many_tokens_as_a_step_holds_follow_the_step() -> None:
    config = EngineConfig(
        hidden_layers=(1, 2),
        attention_heads=((1, 0), (1, 1), (2, 0)),
        max_hidden_rows_per_step="tokens",
        max_query_rows_per_step="tokens",
    )
    heads = {1: LayerHeads(2, 1, 8), 2: LayerHeads(1, 1, 8)}
    for tokens in (5, 8192):
        sizes = Sizing(config, StepLimits(3, tokens), 4096, 2, heads, gathers_keys=False)
        assert (sizes.hidden_slots, sizes.query_slots) == (2 * tokens, 3 * tokens)
        assert sizes.tap_bytes["attention tap of a layer"] * 3 == sizes.device_bytes["attention taps"] * 2
        with pytest.raises(BuffersTooLargeError, match="--max-num-batched-tokens"):
            sizes.check_device(0)


def test_the_words_counted_are_those_of_the_ops() -> None:
    for name in ("HEADER_WORDS", "GATHER_WORDS", "STEER_ROW_WORDS", "STEER_PASS_WORDS"):
        assert getattr(sizing, name) == getattr(ops, name)


def test_taps_and_requests_have_their_shares_of_the_whole() -> None:
    config = EngineConfig(hidden_layers=(8, 16), attention_heads=((12, 0), (12, 8)), steering_layers=(16,))
    sizes = a_sizing(config, {12: LayerHeads(2, 8, 128)})
    slot, query = 4096 * 2 + 8, 128 * 2 + 8
    assert sizes.tap_bytes == {
        "hidden-state tap": 1024 * slot,
        "attention tap of a layer": 1024 * 2 * query,
        "steering tap": 8192 * 4 * (3 + 4 * 8 + 4),
    }
    assert sizes.request_bytes == 2 * slot + 2 * query + 4 * 8
    assert sizes.shared_token_bytes == 2 * 4096 * 2
    assert sizes.key_token_bytes == 0
    assert a_sizing(config, {12: LayerHeads(2, 8, 128)}, gathers_keys=True).key_token_bytes == 4 * 8 * 128


@pytest.mark.parametrize(
    ("config", "heads", "gathers_keys", "setting"),
    [
        ({"hidden_layers": (1,), "max_hidden_rows_per_step": 10**9}, {}, False, "max_hidden_rows_per_step"),
        (
            {"attention_heads": ((1, 0),), "max_query_rows_per_step": 10**9},
            {1: LayerHeads(1, 8, 128)},
            False,
            "max_query_rows_per_step",
        ),
        ({"attention_heads": ((1, 0),)}, {1: LayerHeads(1, 8, 128)}, True, "--max-num-batched-tokens"),
        ({"steering_layers": (1,)}, {}, False, "--max-num-batched-tokens"),
        ({"max_steering_vectors": 65536}, {}, False, "max_steering_vectors"),
    ],
)
def test_what_does_not_fit_names_the_setting_that_it_follows_from(
    config: dict[str, object], heads: dict[int, LayerHeads], gathers_keys: bool, setting: str
) -> None:
    sizes = a_sizing(EngineConfig.model_validate(config), heads, gathers_keys=gathers_keys)
    needed = sum(sizes.device_bytes.values())
    sizes.check_device(needed)
    sizes.check_device(needed - sizes.vector_bytes, taken_bytes=sizes.vector_bytes)
    with pytest.raises(BuffersTooLargeError, match=setting):
        sizes.check_device(needed - 1)


def test_shared_memory_that_the_host_has_not_is_refused() -> None:
    sizes = a_sizing(EngineConfig(hidden_layers=(1,)))
    sizes.check_host(2**28)
    with pytest.raises(BuffersTooLargeError, match="max_shared_bytes"):
        sizes.check_host(2**28 - 1)
    a_sizing(EngineConfig(steering_layers=(1,))).check_host(0)


def test_buffers_that_the_machine_has_no_room_for_are_refused_before_they_are_allocated() -> None:
    config = EngineConfig(hidden_layers=(1,), max_hidden_rows_per_step=10**13)
    with pytest.raises(BuffersTooLargeError, match="max_hidden_rows_per_step"):
        allocate(config, StepLimits(3, 5))
    with pytest.raises(BuffersTooLargeError, match="max_shared_bytes"):
        allocate(EngineConfig(hidden_layers=(1,), max_shared_bytes=10**15), StepLimits(3, 5))


def test_the_start_log_says_what_a_tap_and_a_request_take(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="vllm.mia"):
        made = allocate(EngineConfig(hidden_layers=(1,)), StepLimits(3, 5))
    for text in (made.sizing.taps_text, made.sizing.request_text, made.sizing.host_text):
        assert text in caplog.text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (2**28, "256 MiB"), (2**30, "1 GiB"), (5 * 2**40, "5120 GiB")],
)
def test_sizes_are_written_with_a_unit(size_bytes: int, text: str) -> None:
    assert in_units(size_bytes) == text
