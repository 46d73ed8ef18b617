"""Chooses the attention tracker's heads: rules rank heads on training rows, validation rows pick among the rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

from detectors.attention_tracker import focus_scores
from detectors.calibration.features import Features
from detectors.calibration.metrics import Labels, Scores

TOP_COUNTS = (1, 2, 4, 8, 16, 32)
STANDARD_DEVIATIONS = (0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0, 4.0)

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FittedTracker:
    """``heads`` count layers from 1, as ``Features`` does."""

    heads: tuple[tuple[int, int], ...]
    choices: dict[str, str]


def fit_tracker(train: Features, train_labels: Labels, validation: Features, labels: Labels) -> FittedTracker:
    rules = dict(head_rules(_drift(train), train_labels))
    tried = {rule: float(roc_auc_score(labels, tracker_scores(validation, heads))) for rule, heads in rules.items()}
    best = max(tried, key=lambda rule: tried[rule])
    others = ", ".join(f"{rule} {auroc:.3f}" for rule, auroc in tried.items() if rule != best)
    return FittedTracker(
        tuple(train.heads[i] for i in rules[best]),
        {"heads": f"{best}: AUROC on validation rows {tried[best]:.3f}; other rules: {others}"},
    )


def head_rules(drift: Scores, labels: Labels) -> Iterator[tuple[str, Indices]]:
    """Rule -> head indices. drift: ``[rows, heads]``, 1 - focus score of each head alone.

    The paper's rule keeps heads whose drift differs between attacks and normal prompts by more than n standard
    deviations of both; heads so few rows cannot tell apart drop out. The other takes the k heads with the best AUROC.
    """
    benign, attack = drift[labels == 0], drift[labels == 1]
    for n in STANDARD_DEVIATIONS:
        margin = attack.mean(axis=0) - benign.mean(axis=0) - n * (attack.std(axis=0) + benign.std(axis=0))
        if (heads := np.flatnonzero(margin > 0)).size:
            yield f"mean-{n:g}std ({heads.size} heads)", heads
    aurocs = np.array([roc_auc_score(labels, drift[:, head]) for head in range(drift.shape[1])])
    order = np.argsort(-aurocs, kind="stable")
    for count in TOP_COUNTS:
        if count <= len(order):
            yield f"top {count} by AUROC", np.sort(order[:count])


def tracker_scores(features: Features, heads: Indices) -> Scores:
    """The detector's value per row for these heads."""
    return np.asarray(_drift(features)[:, heads].mean(axis=1))


def _drift(features: Features) -> Scores:
    focus = focus_scores(features.mass[..., 0], features.mass[..., 1])
    return 1.0 - focus.astype(np.float64)
