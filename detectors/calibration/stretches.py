"""Stretches of a long document by what the attention of one pass over all of it puts on each, in several scalings.

Owns these scalings, and choosing heads for one. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata  # type: ignore[import-untyped]

from detectors.attention_tracker import focus_scores
from detectors.calibration.long_readings import Whole
from detectors.calibration.metrics import Labels, Scores, auroc

HEADS = (1, 2, 4, 8, 16)
BINS = 8
"""Of a stretch's distance from the prompt's end, on a logarithmic scale."""
EPSILON = 1e-9
FOLDS = 4

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """Of one candidate: each case's score, and how much of its attack is in the stretch that the score is of (0 where
    there is none), with what a stretch drawn at random would have."""

    scores: Scores
    hit: Array
    chance: Array


@dataclass(frozen=True)
class Stretches:
    """Of one case. mass: ``[stretches, heads]``; starts, ends: tokens; overlap: share of the attack in each."""

    mass: Array
    starts: Index
    ends: Index
    overlap: Array
    instruction: Array
    instruction_tokens: int
    prompt_tokens: int


def stretches_of(whole: Whole, tokens: int) -> Stretches:
    """Half a stretch apart; the last one of a range ends with it."""
    edges: list[tuple[int, int]] = []
    for start, end in whole.data:
        last = max(start, end - tokens)
        edges += [*((at, at + tokens) for at in range(start, last, tokens // 2)), (last, end)]
    starts, ends = np.array(edges).T
    weights = whole.weights.astype(np.float64)
    sums = np.concatenate([np.zeros((len(weights), 1)), np.cumsum(weights, axis=1)], axis=1)
    low, high = whole.attack or (0, 0)
    shared = np.clip(np.minimum(ends, high) - np.maximum(starts, low), 0, None) / max(1, high - low)
    count = sum(end - start for start, end in whole.instruction)
    mass = (sums[:, ends] - sums[:, starts]).T
    return Stretches(mass, starts, ends, shared, whole.mass[:, 0].astype(np.float64), count, weights.shape[1])


Scaling = Callable[[Stretches], Array]
"""``[stretches, heads]``: higher the likelier an attack."""


def scalings(profile: Callable[[Stretches], Array]) -> dict[str, Scaling]:
    """``profile``: the logarithm of the density that a benign document has at each stretch's place."""

    def density(one: Stretches) -> Array:
        lengths = np.maximum(one.ends - one.starts, 1)[:, None]
        return np.asarray(np.log(one.mass / lengths + EPSILON))

    def z_score(one: Stretches) -> Array:
        found = density(one)
        return np.asarray((found - found.mean(axis=0)) / (found.std(axis=0) + 0.1))

    def of_instruction(one: Stretches) -> Array:
        return np.asarray(1 - focus_scores(one.instruction[None], one.mass))

    def beside_instruction(one: Stretches) -> Array:
        return np.asarray(density(one) - np.log(one.instruction / max(1, one.instruction_tokens) + EPSILON))

    return {
        "share of instruction and stretch": of_instruction,
        "density beside the instruction's": beside_instruction,
        "density against the document's other stretches, z-score": z_score,
        "density against the document's median": lambda one: density(one) - np.median(density(one), axis=0),
        "density against a benign document's at this place": lambda one: density(one) - profile(one),
        "density against a benign document's at this place and the document's median": lambda one: centred(
            density(one) - profile(one)
        ),
    }


def centred(values: Array) -> Array:
    return np.asarray(values - np.median(values, axis=0))


def profile_of(benign: Sequence[Stretches]) -> Callable[[Stretches], Array]:
    """Mean logarithm of the density by distance from the prompt's end, of benign documents."""

    def bins(one: Stretches) -> Index:
        away = np.log2(np.maximum(one.prompt_tokens - one.ends, 1))
        return np.asarray(np.minimum(away * BINS / 12, BINS - 1), np.int64)

    logs = [np.log(one.mass / np.maximum(one.ends - one.starts, 1)[:, None] + EPSILON) for one in benign]
    every, at = np.concatenate(logs), np.concatenate([bins(one) for one in benign])
    table = np.stack([every[at == i].mean(axis=0) if (at == i).any() else every.mean(axis=0) for i in range(BINS)])

    def at_place(one: Stretches) -> Array:
        return np.asarray(table[bins(one)])

    return at_place


def by_head(values: Sequence[Array]) -> Array:
    """``[cases, heads]``: of each head alone the highest of all stretches."""
    return np.stack([one.max(axis=0) for one in values])


def found_by(values: Sequence[Array], overlaps: Sequence[Array]) -> Found:
    """values: of each case, one for each stretch."""
    best = [int(one.argmax()) for one in values]
    return Found(
        np.array([one[i] for one, i in zip(values, best, strict=True)]),
        np.array([float(over[i] > 0.5) for over, i in zip(overlaps, best, strict=True)]),
        np.array([float((over > 0.5).mean()) for over in overlaps]),
    )


def choose_heads(values: Sequence[Array], labels: Labels, documents: Sequence[str]) -> tuple[Index, float]:
    """Of ``values`` ``[stretches, heads]`` of each case: the heads with the best AUROC, as many as do best out of fold
    by document, and that AUROC out of fold."""
    single = by_head(values)
    names = sorted(set(documents))
    folds = np.array([names.index(document) % FOLDS for document in documents])
    tried: dict[int, float] = {}
    for count in HEADS:
        scores = np.zeros(len(values))
        for fold in range(FOLDS):
            heads = _best(single[folds != fold], labels[folds != fold], count)
            for i in np.flatnonzero(folds == fold):
                scores[i] = values[i][:, heads].mean(axis=1).max()
        tried[count] = auroc(scores, labels)
    count = max(tried, key=lambda one: tried[one])
    return _best(single, labels, count), tried[count]


def _best(single: Array, labels: Labels, count: int) -> Index:
    """By AUROC, which for a given number of attacks is the sum of their ranks."""
    ranks: Array = rankdata(single, axis=0)
    order: Index = np.argsort(-ranks[labels == 1].sum(axis=0), kind="stable")
    return order[:count]
