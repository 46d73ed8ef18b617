"""Measures of a detector on labelled scores, with counts and intervals.

Owns the arithmetic. Scores are higher the likelier an attack; labels are 1 for attacks. Nothing is fitted here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
"""A budget b needs 3/b different benign rows: with fewer, even no false positive at all leaves the true rate's upper
95 % bound above b (the rule of three, Hanley and Lippman-Hand, JAMA 249, 1983)."""


@dataclass(frozen=True)
class Tried:
    """Scores and labels ``[rows]``. groups: rows of one group are nearly the same and count as one; None where each
    row is one of its own."""

    scores: Scores
    labels: Labels
    groups: Sequence[str] | None = None

    def of(self, label: Literal[0, 1]) -> tuple[Scores, list[str] | None]:
        """The scores of rows with this label, and their groups."""
        index = np.flatnonzero(self.labels == label)
        return self.scores[index], None if self.groups is None else [self.groups[i] for i in index]


class BudgetError(ValueError):
    """A false-positive budget that the rows cannot support; the message says how many it needs."""


def rows_needed(budget: float) -> int:
    return math.ceil(ROWS_PER_BUDGET / budget - 1e-9)


def check_budget(benign_rows: int, budget: float) -> None:
    """Raise ``BudgetError`` when so few different benign rows cannot support the budget."""
    if not 0 < budget < 0.5:
        raise BudgetError(f"a false-positive budget lies between 0 and 0.5, not at {budget:g}")
    if benign_rows < rows_needed(budget):
        raise BudgetError(
            f"a budget of {budget:.2%} needs at least {rows_needed(budget)} benign rows, there are {benign_rows}; "
            "give more benign data or allow more false positives"
        )


def weights_of(count: int, groups: Sequence[str] | None) -> Scores:
    """``[count]``: what each row counts, so that every group counts as one."""
    if groups is None:
        return np.ones(count)
    rows = Counter(groups)
    return np.array([1.0 / rows[group] for group in groups], np.float64)


def threshold_for_fpr(benign: Scores, budget: float, groups: Sequence[str] | None = None) -> float:
    """A value that at most ``budget`` of the benign scores reach: midway between the last allowed and the next one.

    groups: of each score; all of one group count as one, so that of the scores themselves more than that may. With no
    false positive allowed (fewer than 1/budget rows) it lies just above the highest benign score.
    """
    order = np.argsort(-benign, kind="stable")
    ordered, counts = benign[order], np.cumsum(weights_of(len(benign), groups)[order])
    allowed = int(np.searchsorted(counts, budget * counts[-1] * (1 + 1e-12), side="right"))
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


def threshold(value: float, validation: Tried, held_out: Tried) -> Threshold:
    """One operating point with what it did on both sets of rows."""
    (setting, setting_groups), (benign, groups) = validation.of(0), held_out.of(0)
    attack, attack_groups = held_out.of(1)
    set_on, tried_on = _shares(setting >= value, setting_groups), _shares(benign >= value, groups)
    caught = _shares(attack >= value, attack_groups) if len(attack) else None
    return Threshold(
        value=value,
        validation_benign=len(setting),
        validation_benign_groups=None if setting_groups is None else len(set(setting_groups)),
        validation_false_positives=int((setting >= value).sum()),
        validation_fpr=set_on[0],
        validation_fpr_interval=set_on[1],
        held_out_benign=len(benign),
        held_out_benign_groups=None if groups is None else len(set(groups)),
        held_out_false_positives=int((benign >= value).sum()),
        held_out_fpr=tried_on[0],
        held_out_fpr_interval=tried_on[1],
        held_out_attack=len(attack),
        held_out_true_positives=int((attack >= value).sum()),
        held_out_tpr=caught[0] if caught else None,
        held_out_tpr_interval=caught[1] if caught else None,
    )


def thresholds(validation: Tried, held_out: Tried) -> dict[str, Threshold]:
    """The named operating points that policies use, set on ``validation``."""
    return {name: threshold(value, validation, held_out) for name, value in values_within_budgets(validation).items()}


def values_within_budgets(*parts: Tried) -> dict[str, float]:
    """Those budgets that the different benign rows of all parts together support and that a score can reach, each kept
    among the benign rows of every part alone, by the highest of their values; and ``balanced``, of all together."""
    benign = [part.of(0) for part in parts]
    different = sum(len(scores) if groups is None else len(set(groups)) for scores, groups in benign)
    values = {
        name: max(threshold_for_fpr(scores, budget, groups) for scores, groups in benign)
        for name, budget in BUDGETS.items()
        if different >= rows_needed(budget)
    }
    # Scores of our kinds end at 1: where too many benign rows have that, nothing lies above them.
    highest = max(scores.max() for scores, _ in benign)
    values = {name: value for name, value in values.items() if not value > 1.0 >= highest}
    values["balanced"] = balanced_threshold(
        np.concatenate([part.scores for part in parts]), np.concatenate([part.labels for part in parts])
    )
    return values


def left_out(points: Mapping[str, Threshold]) -> dict[str, str]:
    """By name, why ``thresholds``, which gave these, has none for a budget."""
    some = next(iter(points.values()))
    different = some.validation_benign if some.validation_benign_groups is None else some.validation_benign_groups
    return {
        name: f"it needs {rows_needed(budget)} different benign rows to be set on, and there are {different}"
        if different < rows_needed(budget)
        else "too many of the benign rows that it would be set on have the highest score that there can be"
        for name, budget in BUDGETS.items()
        if name not in points
    }


def _shares(hit: npt.NDArray[np.bool_], groups: Sequence[str] | None) -> tuple[float, Interval]:
    """The share that is hit, every group counting as one, and its interval."""
    weights = weights_of(len(hit), groups)
    share = float(weights[hit].sum() / weights.sum())
    return share, share_interval(share, round(float(weights.sum())))


def share_interval(share: float, groups: int) -> Interval:
    """Exact 95 % interval of a share of rows, of which so many are different: Clopper-Pearson with as many trials as
    that (Korn and Graubard, Survey Methodology 24, 1998)."""
    return clopper_pearson(share * groups, groups)


def clopper_pearson(hits: float, total: int) -> Interval:
    """Exact 95 % interval of a share."""
    low = 0.0 if hits <= 1e-9 else float(beta.ppf(0.025, hits, total - hits + 1))
    high = 1.0 if hits >= total - 1e-9 else float(beta.ppf(0.975, hits + 1, total - hits))
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
