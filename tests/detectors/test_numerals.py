"""A number in figures is on the side of another one that it really is on."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from detectors.numerals import numeral

shares = st.floats(0, 1)


@given(shares, shares)
@example(0.94996, 0.95)
@example(0.9999999, 1.0)
@example(1e-12, 0.0)
def test_what_differs_looks_different_and_keeps_its_order(one: float, other: float) -> None:
    told, beside = numeral(one, other), numeral(other, one)
    assert (told == beside) == (one == other)
    assert (float(told) < float(beside)) == (one < other)


@given(st.lists(shares, min_size=1, max_size=4))
def test_beside_several_it_keeps_its_place_and_only_1_is_1(numbers: list[float]) -> None:
    first, *others = numbers
    told = float(numeral(first, *others))
    assert (told == 1) == (first == 1)
    for other in others:
        assert (told < float(numeral(other, first))) == (first < other)


@pytest.mark.parametrize(("value", "told"), [(0.5, "0.5"), (0.994312, "0.9943"), (0.99996, "0.99996"), (1.0, "1")])
def test_it_has_as_few_figures_as_will_do(value: float, told: str) -> None:
    assert numeral(value) == told
