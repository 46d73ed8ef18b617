"""Measures with counts: budgets are kept, intervals cover, known cases give known numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.calibration.metrics import (
    BUDGETS,
    BudgetError,
    Tried,
    balanced_threshold,
    check_budget,
    clopper_pearson,
    left_out,
    quality,
    rows_needed,
    threshold,
    threshold_for_fpr,
    thresholds,
    tpr_at_fpr,
)
from guard.data import data_folder

SCORES = st.lists(st.floats(0, 1), min_size=2, max_size=300).map(np.array)


@given(SCORES, st.sampled_from([0.001, 0.01, 0.05, 0.5]))
def test_a_threshold_never_exceeds_its_budget(benign: np.ndarray, budget: float) -> None:
    assert np.mean(benign >= threshold_for_fpr(benign, budget)) <= budget


def test_a_threshold_uses_the_whole_budget_when_scores_differ() -> None:
    benign = np.linspace(0, 1, 200)
    assert (benign >= threshold_for_fpr(benign, 0.05)).sum() == 10


def test_the_balanced_threshold_separates_what_can_be_separated() -> None:
    scores, labels = np.array([0.1, 0.2, 0.7, 0.8]), np.array([0, 0, 1, 1])
    assert 0.2 < balanced_threshold(scores, labels) <= 0.7


def test_tpr_counts_attacks_above_what_benign_rows_allow() -> None:
    scores = np.array([*np.linspace(0, 0.5, 100), 0.6, 0.6, 0.1, 0.4])
    labels = np.array([0] * 100 + [1] * 4)
    assert tpr_at_fpr(scores, labels, 0.01) == 0.5


@pytest.mark.parametrize(("hits", "total", "low", "high"), [(0, 100, 0.0, 0.0362), (1, 100, 0.0003, 0.0545)])
def test_exact_intervals_are_those_of_the_textbook(hits: int, total: int, low: float, high: float) -> None:
    interval = clopper_pearson(hits, total)
    assert interval.low == pytest.approx(low, abs=1e-4)
    assert interval.high == pytest.approx(high, abs=1e-4)


def test_quality_reports_counts_intervals_and_sources() -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], 100)
    scores = labels + generator.normal(size=200)
    found = quality(scores, labels, [str(i // 2) for i in range(200)], ["a", "b"] * 100, seed=0)
    assert (found.benign, found.attack) == (100, 100)
    assert found.auroc_interval.low < found.auroc < found.auroc_interval.high
    assert found.auroc_by_source.keys() == {"a", "b"}


def test_rows_of_one_group_count_as_one_in_the_interval() -> None:
    labels = np.repeat([0, 1], 60)
    scores = labels * 0.8 + np.random.default_rng(1).normal(size=120)
    alone = quality(scores, labels, [str(i) for i in range(120)], ["a"] * 120, seed=0).auroc_interval
    tens = np.repeat(np.arange(12), 10)
    grouped_scores = labels * 0.8 + np.random.default_rng(1).normal(size=12)[tens]
    grouped = quality(grouped_scores, labels, [str(g) for g in tens], ["a"] * 120, seed=0).auroc_interval
    assert grouped.high - grouped.low > alone.high - alone.low


def test_named_thresholds_say_what_they_did_on_held_out_rows() -> None:
    labels = np.repeat([0, 1], [400, 100])
    validation = np.concatenate([np.linspace(0, 0.5, 400), np.linspace(0.4, 1, 100)])
    held_out = np.concatenate([np.linspace(0, 0.6, 400), np.linspace(0.4, 1, 100)])
    named = thresholds(Tried(validation, labels), Tried(held_out, labels))
    assert named.keys() == {"fpr_1pct", "fpr_5pct", "balanced"}
    strict = named["fpr_1pct"]
    assert strict.validation_false_positives == 4
    assert strict.validation_fpr_interval is not None
    assert strict.validation_fpr_interval.low < 0.01 < strict.validation_fpr_interval.high
    assert strict.held_out_false_positives == int((held_out[:400] >= strict.value).sum()) > 4
    assert strict.held_out_fpr_interval.low < strict.held_out_false_positives / 400 < strict.held_out_fpr_interval.high
    assert strict.held_out_tpr_interval is not None
    assert strict.held_out_tpr_interval.low < strict.held_out_true_positives / 100 < strict.held_out_tpr_interval.high


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40)), min_size=60, max_size=200),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40)), min_size=5, max_size=50),
)
def test_an_interval_has_the_share_in_it_that_the_file_says(
    benign: list[tuple[float, int]], attack: list[tuple[float, int]]
) -> None:
    scores = np.array([score for score, _ in (*benign, *attack)])
    labels = np.repeat([0, 1], [len(benign), len(attack)])
    groups = [f"benign {group}" for _, group in benign] + [f"attack {group}" for _, group in attack]
    both = Tried(scores, labels, groups)
    for value in (0.0, float(np.median(scores)), threshold_for_fpr(scores[labels == 0], 0.05, groups[: len(benign)])):
        point = threshold(value, both, both)
        for share, interval in (
            (point.validation_fpr, point.validation_fpr_interval),
            (point.held_out_fpr, point.held_out_fpr_interval),
            (point.held_out_tpr, point.held_out_tpr_interval),
        ):
            assert share is not None
            assert interval is not None
            assert interval.low - 1e-9 <= share <= interval.high + 1e-9
        assert point.validation_fpr == point.held_out_fpr
        if value > np.median(scores):
            assert point.validation_fpr is not None
            assert point.validation_fpr <= 0.05 + 1e-9


def test_shipped_files_keep_their_budgets_and_their_intervals_have_their_own_shares_in_them() -> None:
    files = [json.loads(path.read_text()) for path in data_folder("model_configs").glob("*/SmolLM2-135M-Instruct.json")]
    points = [
        (name, point)
        for raw in files
        if isinstance(raw, dict) and raw.get("calibration")
        for name, point in raw["calibration"]["thresholds"].items()
    ]
    assert len(points) > 15
    for name, point in points:
        assert point["validation_fpr"] <= BUDGETS.get(name, 1.0)
        for share in ("validation_fpr", "held_out_fpr"):
            interval = point[f"{share}_interval"]
            assert interval["low"] <= point[share] <= interval["high"]


@pytest.mark.parametrize(("benign", "names"), [(59, set()), (60, {"fpr_5pct"}), (300, {"fpr_5pct", "fpr_1pct"})])
def test_a_budget_that_the_rows_cannot_support_gets_no_threshold(benign: int, names: set[str]) -> None:
    labels = np.repeat([0, 1], [benign, 50])
    scores = np.concatenate([np.linspace(0, 0.5, benign), np.linspace(0.4, 1, 50)])
    named = thresholds(Tried(scores, labels), Tried(scores, labels))
    assert named.keys() == names | {"balanced"}
    assert left_out(named).keys() == BUDGETS.keys() - names
    assert f"needs 3000 different benign rows to be set on, and there are {benign}" in left_out(named)["fpr_0_1pct"]


@pytest.mark.parametrize("budget", [0.001, 0.01, 0.05])
def test_with_the_rows_that_a_budget_needs_no_hit_at_all_keeps_the_true_rate_within_it(budget: float) -> None:
    # One-sided 95 %: the chance of no hit among n rows at the true rate b is (1 - b)^n.
    assert (1 - budget) ** rows_needed(budget) <= 0.05
    check_budget(rows_needed(budget), budget)
    with pytest.raises(BudgetError, match=f"needs at least {rows_needed(budget)} benign rows"):
        check_budget(rows_needed(budget) - 1, budget)


def test_copies_grant_no_budget_and_no_confidence() -> None:
    generator = np.random.default_rng(3)
    benign = np.repeat(generator.uniform(0, 0.5, 84), 60)
    scores, labels = np.concatenate([benign, np.linspace(0.4, 1, 50)]), np.repeat([0, 1], [5040, 50])
    groups = [f"text {i // 60}" for i in range(5040)] + [f"attack {i}" for i in range(50)]
    copied = thresholds(Tried(scores, labels, groups), Tried(scores, labels, groups))
    once = Tried(scores[[*range(0, 5040, 60), *range(5040, 5090)]], np.repeat([0, 1], [84, 50]))
    assert copied.keys() == thresholds(once, once).keys() == {"fpr_5pct", "balanced"}
    point, alone = copied["fpr_5pct"], thresholds(once, once)["fpr_5pct"]
    assert point.validation_false_positives == 60 * alone.validation_false_positives
    assert (point.validation_benign, point.validation_benign_groups) == (5040, 84)
    assert point.validation_fpr_interval == alone.validation_fpr_interval
    assert point.held_out_fpr_interval.high == pytest.approx(alone.held_out_fpr_interval.high)


def test_one_text_many_times_does_not_use_up_the_budget_of_all() -> None:
    benign = np.concatenate([np.full(1000, 0.3), np.linspace(0.0, 0.9, 400)])
    groups = ["copied"] * 1000 + [str(i) for i in range(400)]
    value = threshold_for_fpr(benign, 0.01, groups)
    assert (benign[1000:] >= value).sum() == 4
    assert threshold_for_fpr(benign, 0.01) < value


@given(SCORES, st.lists(st.sampled_from("abcdefgh"), min_size=300, max_size=300))
def test_of_groups_too_no_more_than_the_budget_reaches_a_threshold(benign: np.ndarray, drawn: list[str]) -> None:
    groups = drawn[: len(benign)]
    hit = benign >= threshold_for_fpr(benign, 0.2, groups)
    shares = [hit[[i for i, one in enumerate(groups) if one == name]].mean() for name in set(groups)]
    assert np.mean(shares) <= 0.2 + 1e-9


def test_a_budget_that_no_score_can_keep_gets_no_threshold() -> None:
    scores, labels = np.concatenate([np.ones(100), np.linspace(0.4, 1, 50)]), np.repeat([0, 1], [100, 50])
    named = thresholds(Tried(scores, labels), Tried(scores, labels))
    assert named.keys() == {"balanced"}
    assert "the highest score that there can be" in left_out(named)["fpr_5pct"]
