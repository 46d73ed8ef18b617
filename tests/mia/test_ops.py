"""The ops against one numpy oracle, with padded entries, empty routing and repeated rows; schemas and fakes too."""

from math import inf

import numpy as np
import pytest
import torch

from guard.mia import ops

TOKENS, WIDTH, CAPACITY = 9, 5, 12


def routing(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(0, TOKENS, (CAPACITY,), generator=torch.Generator().manual_seed(seed))
    return rows, torch.tensor([count])


@pytest.mark.parametrize("count", [0, 1, 7, CAPACITY])
@pytest.mark.parametrize("with_addend", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_are_the_sum_and_the_rest_keeps_its_value(
    count: int, with_addend: bool, dtype: torch.dtype
) -> None:
    source, addend = torch.randn(TOKENS, WIDTH).to(dtype), torch.randn(TOKENS, WIDTH).to(dtype)
    rows, n = routing(count)
    out = torch.full((CAPACITY, WIDTH), 7.0, dtype=dtype)
    torch.ops.mia.gather_rows(source, addend if with_addend else None, rows, n, out)
    expected = source + addend if with_addend else source
    assert torch.equal(out[:count], expected[rows[:count]])
    assert (out[count:] == 7.0).all()


def steering(
    hidden: torch.Tensor, residual: torch.Tensor | None, modes: list[int], keep: bool, passes: int, limit: float = inf
) -> tuple:
    """Arguments of ``steer_rows``: ``passes`` passes over the same rows, none twice in a pass."""
    n = len(modes)
    rows = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))[:n].repeat(passes)
    bounds = torch.tensor([0, *(n * (p + 1) for p in range(passes)), *[n * passes] * (4 - passes)])
    slots = torch.arange(n * passes) % 3
    coefficients, targets = torch.linspace(-2, 2, n * passes), torch.linspace(0, 1, n * passes)
    kept = torch.full((n * passes,), keep)
    bank = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(4))
    limit, doses = torch.tensor([limit]), torch.zeros(n * passes)
    return (
        hidden, residual, rows, slots, torch.tensor(modes * passes), coefficients, targets, kept, bounds, bank, limit,
        doses,
    )  # fmt: skip


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("limit", [inf, 0.3])
@pytest.mark.parametrize("modes", [[], [ops.ADD] * 4, [ops.ADD, ops.PROJECT, ops.REPLACE, ops.ADD]])
@pytest.mark.parametrize("with_residual", [False, True])
def test_steering_changes_the_rows_that_it_names_pass_by_pass_and_no_more_than_the_limit(
    with_residual: bool, modes: list[int], limit: float, keep: bool, passes: int
) -> None:
    hidden, residual = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH) if with_residual else None
    before = hidden.clone()
    arguments = steering(hidden, residual, modes, keep, passes, limit)
    _, _, rows, slots, all_modes, coefficients, targets, _, _, bank, _, doses = arguments
    base = residual.numpy().astype(np.float64) if residual is not None else np.zeros((TOKENS, WIDTH))
    stream = hidden.numpy().astype(np.float64) + base
    start, asked = stream.copy(), []
    for i, row in enumerate(rows.tolist()):
        v, c, s = bank[slots[i]].numpy().astype(np.float64), float(coefficients[i]), stream[row].copy()
        u = v / np.linalg.norm(v)
        after = {ops.ADD: s + c * v, ops.PROJECT: s + c * (float(targets[i]) - s @ u) * u, ops.REPLACE: c * v}[
            int(all_modes[i])
        ]
        after = after * np.linalg.norm(s) / np.linalg.norm(after) if keep else after
        asked.append(np.linalg.norm(after - start[row]) / np.linalg.norm(start[row]))
        stream[row] = start[row] + (after - start[row]) * min(1.0, limit / asked[-1])
    torch.ops.mia.steer_rows(*arguments)
    np.testing.assert_allclose(hidden.numpy() + base, stream, atol=1e-4)
    np.testing.assert_allclose(doses.numpy(), asked, rtol=1e-3)
    total = np.linalg.norm(stream - start, axis=1) / np.linalg.norm(start, axis=1)
    assert (total <= limit + 1e-6).all()
    untouched = sorted(set(range(TOKENS)) - set(rows.tolist()))
    assert torch.equal(hidden[untouched], before[untouched])


@pytest.mark.parametrize("count", [0, 4])
def test_schema_and_fake_agree_with_what_the_ops_really_do(count: int) -> None:
    rows, n = routing(count)
    tests = ("test_schema", "test_faketensor")
    gather = (torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH), rows, n, torch.zeros(CAPACITY, WIDTH))
    torch.library.opcheck(torch.ops.mia.gather_rows.default, gather, test_utils=tests)
    modes = [ops.ADD, ops.PROJECT, ops.REPLACE, ops.ADD][:count]
    arguments = steering(torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH), modes, True, 1)
    torch.library.opcheck(torch.ops.mia.steer_rows.default, arguments, test_utils=tests)
