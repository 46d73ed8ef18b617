"""The ops against one numpy oracle, with padded entries, empty routing and repeated rows; schemas and fakes too."""

import numpy as np
import pytest
import torch

from guard.mia import ops  # noqa: F401  (registers torch.ops.mia)

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


@pytest.mark.parametrize("count", [0, 1, 7, CAPACITY])
def test_steering_adds_each_entry_once_even_on_repeated_rows(count: int) -> None:
    stream, bank = torch.randn(TOKENS, WIDTH), torch.randn(3, WIDTH)
    rows, n = routing(count, seed=1)
    slots = torch.arange(CAPACITY) % 3
    coefficients = torch.linspace(-2, 2, CAPACITY)
    expected = stream.numpy().copy()
    for i in range(count):
        expected[rows[i]] += coefficients[i].item() * bank[slots[i]].numpy()
    untouched = sorted(set(range(TOKENS)) - set(rows[:count].tolist()))
    before = stream[untouched].clone()
    torch.ops.mia.steer_rows(stream, rows, slots, coefficients, n, bank)
    np.testing.assert_allclose(stream.numpy(), expected, atol=1e-5)
    assert torch.equal(stream[untouched], before)


@pytest.mark.parametrize("count", [0, 4])
def test_schema_and_fake_agree_with_what_the_ops_really_do(count: int) -> None:
    rows, n = routing(count)
    tests = ("test_schema", "test_faketensor")
    gather = (torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH), rows, n, torch.zeros(CAPACITY, WIDTH))
    torch.library.opcheck(torch.ops.mia.gather_rows.default, gather, test_utils=tests)
    steer = (torch.randn(TOKENS, WIDTH), rows, rows % 3, torch.ones(CAPACITY), n, torch.randn(3, WIDTH))
    torch.library.opcheck(torch.ops.mia.steer_rows.default, steer, test_utils=tests)
