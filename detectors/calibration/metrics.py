"""Measures of a detector on labelled scores, with counts and intervals.

Owns the arithmetic. Scores are higher the likelier an attack; labels are 1 for attacks. Nothing is fitted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.stats import beta  # type: ignore[import-untyped]
from sklearn.metrics import average_precision_score, roc_auc_score  # type: ignore[import-untyped]

from detectors.model_config import Interval, Quality, Threshold

Scores = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

BOOTSTRAP_ROUNDS = 1000

BUDGETS: Mapping[str, float] = {"fpr_0_1pct": 0.001, "fpr_1pct": 0.01, "fpr_5pct": 0.05}
"""Threshold's name -> share of benign rows that may reach it."""

ROWS_PER_BUDGET = 3.0
"""A budget b needs 3/b benign rows: with fewer, even no false positive at all leaves the true rate's upper 95 % bound
above b (the rule of three, Hanley and Lippman-Hand, JAMA 249, 1983)."""


class BudgetError(ValueError):
    """A false-positive budget that the rows cannot support; the message says how many it needs."""


def rows_needed(budget: float) -> int:
    return math.ceil(ROWS_PER_BUDGET / budget - 1e-9)


def check_budget(benign_rows: int, budget: float) -> None:
    """Raise ``BudgetError`` when so few benign rows cannot support the budget."""
    if not 0 < budget < 0.5:
        raise BudgetError(f"a false-positive budget lies between 0 and 0.5, not at {budget:g}")
    if benign_rows < rows_needed(budget):
        raise BudgetError(
            f"a budget of {budget:.2%} needs at least {rows_needed(budget)} benign rows, there are {benign_rows}; "
            "give more benign data or allow more false positives"
        )


def threshold_for_fpr(benign: Scores, budget: float) -> float:
    """A value that at most ``budget`` of the benign scores reach: midway between the last allowed and the next one.

    With no false positive allowed (fewer than 1/budget rows) it lies just above the highest benign score.
    """
    ordered = np.sort(benign)[::-1]
    allowed = int(budget * len(ordered))
    if allowed == 0 or ordered[allowed - 1] == ordered[allowed]:
        return float(np.nextafter(ordered[allowed], np.inf))
    return float((ordered[allowed - 1] + ordered[allowed]) / 2)


def balanced_threshold(scores: Scores, labels: Labels) -> float:
    """The value that makes true positive rate minus false positive rate largest (Youden); the lowest such one."""
    benign, attack = np.sort(scores[labels == 0]), np.sort(scores[labels == 1])
    values = np.unique(scores)
    true_positives = 1 - np.searchsorted(attack, values) / len(attack)
    false_positives = 1 - np.searchsorted(benign, values) / len(benign)
    return float(values[np.argmax(true_positives - false_positives)])


def tpr_at_fpr(scores: Scores, labels: Labels, budget: float) -> float:
    """Share of attacks above the threshold that these same benign rows allow."""
    return float(np.mean(scores[labels == 1] >= threshold_for_fpr(scores[labels == 0], budget)))


def auroc(scores: Scores, labels: Labels) -> float:
    return float(roc_auc_score(labels, scores))


def quality(scores: Scores, labels: Labels, groups: Sequence[str], sources: Sequence[str], seed: int) -> Quality:
    """Everything that is reported about held-out rows. ``groups`` are what the bootstrap draws."""
    rounds = bootstrap(labels, groups, seed)
    source = np.asarray(sources)
    return Quality(
        benign=int((labels == 0).sum()),
        attack=int((labels == 1).sum()),
        auroc=auroc(scores, labels),
        auroc_interval=interval(lambda i: auroc(scores[i], labels[i]), rounds),
        auprc=float(average_precision_score(labels, scores)),
        tpr_at_fpr_1pct=tpr_at_fpr(scores, labels, 0.01),
        tpr_at_fpr_1pct_interval=interval(lambda i: tpr_at_fpr(scores[i], labels[i], 0.01), rounds),
        auroc_by_source={
            name: auroc(scores[source == name], labels[source == name])
            for name in sorted(set(sources))
            if len(set(labels[source == name])) == 2
        },
    )


def threshold(value: float, validation: tuple[Scores, Labels], held_out: tuple[Scores, Labels]) -> Threshold:
    """One operating point with what it did on both sets of rows."""
    validation_benign = validation[0][validation[1] == 0]
    false_positives = int((validation_benign >= value).sum())
    benign, attack = (held_out[0][held_out[1] == label] for label in (0, 1))
    hits = int((benign >= value).sum())
    return Threshold(
        value=value,
        validation_benign=len(validation_benign),
        validation_false_positives=false_positives,
        validation_fpr_interval=clopper_pearson(false_positives, len(validation_benign)),
        held_out_benign=len(benign),
        held_out_false_positives=hits,
        held_out_fpr_interval=clopper_pearson(hits, len(benign)),
        held_out_attack=len(attack),
        held_out_true_positives=int((attack >= value).sum()),
    )


def thresholds(validation: tuple[Scores, Labels], held_out: tuple[Scores, Labels]) -> dict[str, Threshold]:
    """The named operating points that policies use: those budgets that the benign validation rows support, and
    ``balanced``."""
    benign = validation[0][validation[1] == 0]
    values = {
        name: threshold_for_fpr(benign, budget)
        for name, budget in BUDGETS.items()
        if len(benign) >= rows_needed(budget)
    }
    values["balanced"] = balanced_threshold(*validation)
    return {name: threshold(value, validation, held_out) for name, value in values.items()}


def clopper_pearson(hits: int, total: int) -> Interval:
    """Exact 95 % interval of a share."""
    low = 0.0 if hits == 0 else float(beta.ppf(0.025, hits, total - hits + 1))
    high = 1.0 if hits == total else float(beta.ppf(0.975, hits + 1, total - hits))
    return Interval(low=low, high=high)


def bootstrap(
    labels: Labels, groups: Sequence[str], seed: int, count: int = BOOTSTRAP_ROUNDS
) -> list[npt.NDArray[np.int64]]:
    """Row indices of each round: groups drawn with replacement, so that rows of one idea count as one."""
    generator = np.random.default_rng(seed)
    where: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        where.setdefault(group, []).append(i)
    members = [np.array(where[group]) for group in sorted(where)]
    rounds: list[npt.NDArray[np.int64]] = []
    while len(rounds) < count:
        drawn = np.concatenate([members[i] for i in generator.integers(0, len(members), len(members))])
        if len(set(labels[drawn])) == 2:
            rounds.append(drawn)
    return rounds


def interval(measure: Callable[[npt.NDArray[np.int64]], float], rounds: list[npt.NDArray[np.int64]]) -> Interval:
    """The middle 95 % of a measure over the rounds."""
    low, high = np.quantile([measure(i) for i in rounds], (0.025, 0.975))
    return Interval(low=float(low), high=float(high))
