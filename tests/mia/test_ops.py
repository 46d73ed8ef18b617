"""The ops against numpy, written token by token: padded rows, empty routing, shut gates, limits; schemas and fakes too.

On a GPU and in Triton's interpreter (see ``test_kernels``) the same cases go through the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.mia import ops
from guard.mia.ops import (
    ADD,
    FIRST_PART,
    LAST_PART,
    PROJECT,
    REPLACE,
    SHUT,
    GateEntry,
    GatherEntry,
    SteerPass,
    SteerRow,
)

Array = npt.NDArray[np.float64]
TOKENS, WIDTH, CAPACITY, TAPS = 9, 5, 12, 3
UNTOUCHED = 7.0

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter cuts float32 to bfloat16 where every GPU rounds.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
HALF_STEP = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bits(value: float) -> int:
    """The word that holds a float32."""
    return int(np.float32(value).view(np.int32))


def block(tap: int, entries: Sequence[tuple[int, ...]], pool: Sequence[int] = ()) -> torch.Tensor:
    """A control block in which one of ``TAPS`` taps has entries; ``pool`` begins at the word ``POOL``."""
    header = [0] * (2 * TAPS)
    header[2 * tap : 2 * tap + 2] = POOL + len(pool), len(entries)
    return torch.tensor([*header, *pool, *(word for entry in entries for word in entry)], dtype=torch.int32)


POOL = 2 * TAPS


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Tokens that lie side by side; in one dimension more; and as part of a wider tensor, as queries do.
def contiguous(values: torch.Tensor) -> torch.Tensor:
    return values


def batched(values: torch.Tensor) -> torch.Tensor:
    return values[None]


def part_of_wider(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, values + 1], dim=1)[:, : values.shape[1]]


LAYOUTS = [contiguous, batched, part_of_wider]


@pytest.mark.parametrize("count", [0, 1, CAPACITY])
@pytest.mark.parametrize("with_addend", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_rows_are_the_sum_in_their_slots_and_the_rest_keeps_its_value(
    count: int, with_addend: bool, dtype: torch.dtype, layout: Any, device: str
) -> None:
    heads = 3
    source, addend = random(TOKENS, heads * WIDTH, dtype=dtype), random(TOKENS, heads * WIDTH, dtype=dtype, seed=1)
    rng = np.random.default_rng(2)
    rows, slots = rng.integers(0, TOKENS * heads, count).tolist(), rng.permutation(CAPACITY)[:count].tolist()
    control = block(1, [GatherEntry(row, slot) for row, slot in zip(rows, slots, strict=True)])
    wide = torch.full((CAPACITY, WIDTH + 2), UNTOUCHED, dtype=dtype, device=device)
    given_addend = layout(addend.to(device)) if with_addend else None
    torch.ops.mia.gather_rows(layout(source.to(device)), given_addend, control.to(device), 1, wide[:, :WIDTH])
    expected = np.full((CAPACITY, WIDTH + 2), UNTOUCHED)
    for row, slot in zip(rows, slots, strict=True):
        token, head = divmod(row, heads)
        part = slice(head * WIDTH, (head + 1) * WIDTH)
        total = source[token, part].double() + (addend[token, part].double() if with_addend else 0)
        expected[slot, :WIDTH] = total.to(dtype).double()
    np.testing.assert_array_equal(wide.cpu().double().numpy(), expected)


@dataclass(frozen=True)
class Pass:
    vector: int
    mode: int = ADD
    coefficient: float = 1.0
    target: float = 0.0
    keep_norm: bool = False
    gate: int = ops.NO_GATE
    position: int = 0


@dataclass(frozen=True)
class Steered:
    hidden: torch.Tensor
    doses: torch.Tensor


BANK = random(4, WIDTH, seed=4)


def words_of(passes: dict[int, list[Pass]]) -> torch.Tensor:
    """The control block that steers each row by its passes; doses are numbered in the same order."""
    entries, pool, dose = [], list[int](), 0
    for row, steps in passes.items():
        entries.append(SteerRow(row, POOL + len(pool), len(steps)))
        for p in steps:
            numbers = (bits(p.coefficient), bits(p.target), int(p.keep_norm))
            pool += SteerPass(p.vector, p.mode, *numbers, p.gate, p.position, dose)
            dose += 1
    return block(2, entries, pool)


def steer(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    passes: dict[int, list[Pass]],
    device: str,
    limit: float = inf,
    opened_at: Sequence[int] = (),
    bank: torch.Tensor = BANK,
) -> Steered:
    hidden = hidden.clone().to(device)
    doses = torch.full((sum(len(steps) for steps in passes.values()) + 1,), UNTOUCHED, device=device)
    torch.ops.mia.steer_rows(
        hidden,
        None if residual is None else residual.to(device),
        words_of(passes).to(device),
        2,
        bank.to(device),
        torch.tensor([limit], device=device),
        torch.tensor(opened_at, dtype=torch.int32, device=device),
        doses,
    )
    return Steered(hidden.cpu(), doses.cpu())


def steered(
    stream: Array,
    passes: dict[int, list[Pass]],
    limit: float = inf,
    opened_at: Sequence[int] = (),
    bank: torch.Tensor = BANK,
) -> tuple[Array, list[float], Array]:
    """The oracle, in float64: the stream after all passes, their doses, and by what factor each row's rounding grows
    where a short remainder is stretched to the stream's norm."""
    stream, doses, growth = stream.copy(), [], np.ones((len(stream), 1))
    for row, steps in passes.items():
        start = stream[row].copy()
        for p in steps:
            if p.gate >= 0 and p.position < opened_at[p.gate]:
                doses.append(-1.0)
                continue
            s, v, c = stream[row], bank[p.vector].double().numpy(), p.coefficient
            u = v / np.linalg.norm(v)
            after = {ADD: s + c * v, PROJECT: s + c * (p.target - s @ u) * u, REPLACE: c * v}[p.mode]
            if p.keep_norm and np.linalg.norm(after) > 1e-4 * np.linalg.norm(s):
                stretch = np.linalg.norm(s) / np.linalg.norm(after)
                after, growth[row] = after * stretch, growth[row] * max(1.0, stretch)
            dose = np.linalg.norm(after - start) / np.linalg.norm(start)
            doses.append(dose)
            stream[row] = start + (after - start) * (1.0 if dose <= limit else limit / dose)
    return stream, [*doses, UNTOUCHED], growth


def assert_steered(
    got: Steered, hidden: torch.Tensor, residual: torch.Tensor | None, passes: dict[int, list[Pass]], **how: Any
) -> None:
    base = np.zeros(hidden.shape) if residual is None else residual.double().numpy()
    expected, doses, growth = steered(hidden.double().numpy() + base, passes, **how)
    actual, expected = got.hidden.double().numpy() / growth, (expected - base) / growth
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=HALF_STEP[hidden.dtype])
    np.testing.assert_allclose(got.doses.numpy(), doses, rtol=1e-5 * growth.max(), atol=1e-6)
    others = sorted(set(range(len(hidden))) - set(passes))
    assert torch.equal(got.hidden[others], hidden[others])


MIXED = {
    7: [Pass(0, ADD, -2.0), Pass(1, PROJECT, 0.5, 1.5), Pass(2, REPLACE, 0.7)],
    0: [Pass(1, REPLACE, -1.0)],
    3: [Pass(3, PROJECT, 1.0, -0.3), Pass(3, ADD, 0.25), Pass(0, ADD, 1.0), Pass(2, PROJECT, 1.0, 2.0)],
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("limit", [inf, 0.3])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_steering_changes_the_rows_that_it_names_pass_by_pass_and_no_more_than_the_limit(
    keep: bool, limit: float, with_residual: bool, dtype: torch.dtype, device: str
) -> None:
    passes = {
        row: [Pass(p.vector, p.mode, p.coefficient, p.target, keep) for p in steps] for row, steps in MIXED.items()
    }
    hidden, residual = random(TOKENS, WIDTH, dtype=dtype), random(TOKENS, WIDTH, dtype=dtype, seed=1)
    beside = residual if with_residual else None
    assert_steered(steer(hidden, beside, passes, device, limit), hidden, beside, passes, limit=limit)


@pytest.mark.parametrize("width", [2, 16, 300, 2500])
def test_steering_takes_streams_of_any_width(width: int, device: str) -> None:
    hidden, residual, bank = random(TOKENS, width), random(TOKENS, width, seed=1), random(4, width, seed=2)
    got = steer(hidden, residual, MIXED, device, 0.8, bank=bank)
    assert_steered(got, hidden, residual, MIXED, limit=0.8, bank=bank)


def test_a_stream_has_batches_and_a_residual_has_gaps(device: str) -> None:
    hidden, residual = random(TOKENS, WIDTH), random(TOKENS, WIDTH, seed=1)
    plain = steer(hidden, residual, MIXED, device)
    odd = steer(hidden[None], part_of_wider(residual)[None], MIXED, device)
    assert torch.equal(odd.hidden[0], plain.hidden)


def test_without_entries_a_stream_stays_bit_for_bit(device: str) -> None:
    hidden = random(TOKENS, WIDTH)
    got = steer(hidden, random(TOKENS, WIDTH, seed=1), {}, device)
    assert torch.equal(got.hidden, hidden)
    assert got.doses.tolist() == [UNTOUCHED]


def test_a_gate_lets_a_pass_act_from_its_position_on(device: str) -> None:
    opened_at = [10, SHUT]
    passes = {
        1: [Pass(0, gate=0, position=9), Pass(1, gate=1, position=2**30)],
        2: [Pass(0, gate=1, position=10), Pass(1, gate=0, position=10), Pass(2)],
        5: [Pass(3, gate=0, position=11)],
    }
    hidden, residual = random(TOKENS, WIDTH, dtype=DTYPES[-1]), random(TOKENS, WIDTH, seed=1, dtype=DTYPES[-1])
    got = steer(hidden, residual, passes, device, opened_at=opened_at)
    assert_steered(got, hidden, residual, passes, opened_at=opened_at)
    assert torch.equal(got.hidden[1], hidden[1])
    assert got.doses[:3].tolist() == [ops.HELD_BACK] * 3


def test_a_row_that_is_taken_to_nothing_has_no_norm_to_keep(device: str) -> None:
    """``replace`` with 0 leaves rounding at most; scaled up it would be noise as strong as the stream was."""
    hidden = random(TOKENS, WIDTH)
    got = steer(hidden, None, {4: [Pass(0, REPLACE, 0.0, keep_norm=True)]}, device)
    assert got.hidden[4].norm() < 1e-5
    assert got.doses[0] == pytest.approx(1.0, abs=1e-6)


def test_a_stream_and_a_vector_of_zeros_make_no_nan(device: str) -> None:
    got = steer(torch.zeros(TOKENS, WIDTH), None, {4: [Pass(0, PROJECT, 1.0, 2.0)]}, device, bank=torch.zeros(1, WIDTH))
    assert (got.hidden == 0).all()
    assert got.doses[0] == 0


one_pass = st.builds(
    Pass,
    st.integers(0, len(BANK) - 1),
    st.sampled_from([ADD, PROJECT, REPLACE]),
    st.integers(-12, 12).map(lambda quarters: quarters / 4),
    st.integers(-12, 12).map(lambda quarters: quarters / 4),
    st.booleans(),
    st.integers(-1, 1),
    st.integers(0, 4),
)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.integers(0, TOKENS - 1), st.lists(one_pass, min_size=1, max_size=4)),
    st.sampled_from([inf, 1.0, 0.2]),
    st.tuples(st.sampled_from([0, 2, SHUT]), st.sampled_from([3, SHUT])),
)
def test_any_steering_is_the_oracles(passes: dict[int, list[Pass]], limit: float, opened_at: tuple[int, int]) -> None:
    hidden, residual = random(TOKENS, WIDTH), random(TOKENS, WIDTH, seed=1)
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        got = steer(hidden, residual, passes, device, limit, opened_at)
        assert_steered(got, hidden, residual, passes, limit=limit, opened_at=opened_at)


def judge(
    values: npt.ArrayLike, entries: list[GateEntry], opened_at: list[int], sums: list[float], device: str
) -> tuple[list[int], list[float]]:
    opened, summed = torch.tensor(opened_at, dtype=torch.int32), torch.tensor(sums)
    opened, summed = opened.to(device), summed.to(device)
    flat = torch.from_numpy(np.asarray(values, np.float32).reshape(-1)).to(device)
    torch.ops.mia.judge_gates(flat, block(0, entries).to(device), 0, len(entries), opened, summed)
    return opened.tolist(), summed.tolist()


def gate(threshold: float, above: bool, rows: int = 1, columns: int = 1, **fields: int) -> GateEntry:
    """Looks at ``rows`` x ``columns`` values without gaps, from the first on."""
    plain = GateEntry(0, 42, 0, rows, columns, columns, 1, bits(threshold), int(above), 0, 0)
    return plain._replace(**fields)


@pytest.mark.parametrize(
    ("value", "above", "below"),
    [(0.5, False, False), (0.75, True, False), (0.25, False, True), (nan, False, False), (inf, True, False)],
)
def test_a_gate_opens_strictly_beyond_its_threshold_and_never_for_nan(
    value: float, above: bool, below: bool, device: str
) -> None:
    for wanted, opens in ((True, above), (False, below)):
        opened, _ = judge([value], [gate(0.5, wanted)], [SHUT], [0.0], device)
        assert opened == [42 if opens else SHUT]


def test_an_open_gate_stays_as_it_is(device: str) -> None:
    assert judge([1.0], [gate(0.5, True)], [17], [0.0], device)[0] == [17]
    assert judge([0.0], [gate(0.5, True)], [17], [0.0], device)[0] == [17]


def test_each_row_is_judged_by_its_mean_over_the_columns(device: str) -> None:
    values = np.array([[0.0, 1.0, 0.4], [0.9, 0.0, 0.4], [0.5, 0.7, 0.4]])
    # The means of the rows: 0.4667, 0.4333, 0.5333; of the columns: 0.4667, 0.5667, 0.4.
    by_column = {"row_stride": 1, "column_stride": 3}
    assert judge(values, [gate(0.53, True, 3, 3)], [SHUT], [0.0], device)[0] == [42]
    assert judge(values, [gate(0.53, True, 2, 3)], [SHUT], [0.0], device)[0] == [SHUT]
    assert judge(values, [gate(0.56, True, 3, 3)], [SHUT], [0.0], device)[0] == [SHUT]
    assert judge(values, [gate(0.56, True, 3, 3, **by_column)], [SHUT], [0.0], device)[0] == [42]
    assert judge(values, [gate(0.42, False, 3, 3, **by_column)], [SHUT], [0.0], device)[0] == [42]
    assert judge(values, [gate(0.42, False, 3, 3)], [SHUT], [0.0], device)[0] == [SHUT]
    assert judge(values, [gate(0.9, True, 3, 1, first=1, row_stride=3)], [SHUT], [0.0], device)[0] == [42]


def test_a_mean_over_many_rows_is_judged_once_it_is_complete(device: str) -> None:
    rows = np.linspace(0, 1, 300).reshape(150, 2)  # more rows than the kernel looks at together
    first, last = rows[:140], rows[140:]
    mean = rows.mean()
    for above, threshold, opens in ((True, mean - 1e-3, True), (True, mean + 1e-3, False), (False, mean + 1e-3, True)):
        entry = gate(threshold, above, 140, 2, mean_over=150, gate=1, flags=FIRST_PART)
        opened, sums = judge(first, [entry], [SHUT, SHUT], [3.0, 99.0], device)
        assert opened == [SHUT, SHUT]
        np.testing.assert_allclose(sums, [3.0, first.mean(axis=1).sum()], rtol=1e-5)
        opened, sums = judge(last, [entry._replace(rows=10, flags=LAST_PART)], opened, sums, device)
        assert opened == [SHUT, 42 if opens else SHUT]
        np.testing.assert_allclose(sums, [3.0, rows.mean(axis=1).sum()], rtol=1e-5)
    whole = gate(mean - 1e-3, True, 150, 2, mean_over=150, flags=FIRST_PART | LAST_PART)
    assert judge(rows, [whole], [SHUT], [99.0], device)[0] == [42]


def test_several_gates_are_judged_by_themselves(device: str) -> None:
    entries = [gate(0.5, True, gate=i, first=i, opens_from=10 + i) for i in range(3)]
    assert judge([0.6, 0.4, 0.7], entries, [SHUT] * 3, [0.0] * 3, device)[0] == [10, SHUT, 12]
    assert judge([0.6, 0.4, 0.7], [], [SHUT] * 3, [0.0] * 3, device)[0] == [SHUT] * 3


@pytest.mark.parametrize("count", [0, 3])
def test_schema_and_fake_agree_with_what_the_ops_really_do(count: int, device: str) -> None:
    tests = ("test_schema", "test_faketensor")
    hidden, residual = random(TOKENS, WIDTH).to(device), random(TOKENS, WIDTH, seed=1).to(device)
    control = block(1, [GatherEntry(i, i) for i in range(count)]).to(device)
    gather = (hidden, residual, control, 1, torch.zeros(CAPACITY, WIDTH, device=device))
    torch.library.opcheck(torch.ops.mia.gather_rows.default, gather, test_utils=tests)
    passes = dict(list(MIXED.items())[:count])
    gates, limit = torch.tensor([SHUT], dtype=torch.int32, device=device), torch.tensor([inf], device=device)
    control, doses = words_of(passes).to(device), torch.zeros(9, device=device)
    steering = (hidden, residual, control, 2, BANK.to(device), limit, gates, doses)
    torch.library.opcheck(torch.ops.mia.steer_rows.default, steering, test_utils=tests)
    entries = [gate(-9.0, True, mean_over=1, flags=FIRST_PART | LAST_PART)] * min(count, 1)
    control = block(0, entries).to(device)
    judging = (doses, control, 0, len(entries), gates, torch.zeros(1, device=device))
    torch.library.opcheck(torch.ops.mia.judge_gates.default, judging, test_utils=tests)


def test_a_compiled_graph_keeps_the_ops_and_their_order_and_reads_the_control_block_each_time(device: str) -> None:
    residual, out = random(TOKENS, WIDTH, seed=1).to(device), torch.full((2, WIDTH), UNTOUCHED, device=device)
    # Row 3 is steered, then copied; the words of the second tap's entries stand behind those of the third's.
    words = words_of({3: [Pass(0, REPLACE, 2.0)]})
    words[2:4] = torch.tensor([len(words), 1])
    words = torch.cat([words, torch.tensor(GatherEntry(3, 1), dtype=torch.int32)]).to(device)
    control = torch.zeros_like(words)
    gates, limit = torch.tensor([SHUT], dtype=torch.int32, device=device), torch.tensor([inf], device=device)
    bank, doses = BANK.to(device), torch.zeros(1, device=device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        torch.ops.mia.steer_rows(hidden, residual, control, 2, bank, limit, gates, doses)
        torch.ops.mia.gather_rows(hidden, residual, control, 1, out)
        return hidden + 1

    x = random(TOKENS, WIDTH).to(device)
    torch.testing.assert_close(layer(x), x * 2 + 1)
    assert (out == UNTOUCHED).all()
    control.copy_(words)
    stream = x * 2 + residual
    stream[3] = 2 * bank[0]
    torch.testing.assert_close(layer(x), stream - residual + 1, atol=1e-5, rtol=0)
    torch.testing.assert_close(out[1], 2 * bank[0], atol=1e-5, rtol=0)
    assert (out[0] == UNTOUCHED).all()
