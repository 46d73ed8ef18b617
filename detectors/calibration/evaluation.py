"""What a detector is worth on rows that nothing was fitted to: the measures, and the slices that they are taken on.

Owns the report's content as plain data, which ``eval_report`` shows and JSON holds. No text of a row is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.metrics import average_precision_score, roc_curve  # type: ignore[import-untyped]

from detectors.calibration.demands import LEAST_MEASURED
from detectors.calibration.metrics import (
    Labels,
    Scores,
    auroc,
    bootstrap,
    interval,
    share_interval,
    tpr_at_fpr,
)
from detectors.calibration.rows import Row
from detectors.model_config import Interval
from guard.mia.results import FloatArray

SLICE_ROUNDS = 200
LENGTHS = (0, 64, 128, 256, 512, 1024, 4096)
"""Edges of the length buckets, in tokens of the data."""
POSITIONS = "positions"
"""The set of attacks put at the start, the middle and the end of long documents. It is left out of what is pooled."""
COUNTED_APART = (
    f"The set {POSITIONS} (the same attacks at the start, the middle and the end of documents, most of them long) is "
    "not in the figures of all sets together, nor in those of a language, or of a place as a whole. It is in those of "
    "lengths, of places with start, middle or end, and in its own. So parts need not add up to a whole."
)
CURVE_POINTS = 200
BINS = 40


@dataclass(frozen=True)
class Measured:
    """Of one slice. ``tpr_1pct``: share of attacks caught at 1 % false positives among these same benign rows.

    ``benign_from``: whose benign rows they are, where the slice has too few of its own.
    """

    benign: int
    attack: int
    auroc: float
    auroc_interval: tuple[float, float]
    auprc: float
    auprc_interval: tuple[float, float]
    tpr_1pct: float
    tpr_1pct_interval: tuple[float, float]
    tpr_0_1pct: float
    tpr_0_1pct_interval: tuple[float, float]
    benign_from: str = "itself"


@dataclass(frozen=True)
class Hits:
    """How many of some rows reach a threshold, with an exact 95 % interval over groups, of which there are ``groups``:
    rows that are nearly the same count as one in it."""

    rows: int
    hits: int
    interval: tuple[float, float]
    groups: int


@dataclass(frozen=True)
class AtThreshold:
    """One named threshold: false positives and attacks caught, of all rows and of slices."""

    value: float
    false_positives: Hits
    caught: Hits
    false_positives_of: dict[str, Hits] = field(default_factory=dict)
    caught_of: dict[str, Hits] = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """ROC as ``[[false positive rate, true positive rate], ...]``, and histograms of ranks, both labels alike.

    Bins are equal parts of all rows by score, so that scores crowded at either end stay visible.
    """

    roc: list[tuple[float, float]]
    benign: list[int]
    attack: list[int]


@dataclass(frozen=True)
class DetectorReport:
    pooled: Measured
    slices: dict[str, dict[str, Measured]]
    """Kind of slice (set, language, length, place) -> slice -> measures."""
    thresholds: dict[str, AtThreshold]
    curve: Curve
    left_out: dict[str, Measured] = field(default_factory=dict)
    """Set -> measures on all of its rows, by a detector that was fitted without them."""
    remarks: tuple[str, ...] = ()
    """Why the figures may not be the detector's own: rows that it has seen, other weights."""


@dataclass(frozen=True)
class Rated:
    """Rows with the scores of one detector. ``tokens``: of each row's data."""

    rows: Sequence[Row]
    scores: Scores
    tokens: FloatArray

    @property
    def labels(self) -> Labels:
        return np.array([row.label == "attack" for row in self.rows], dtype=np.int64)

    @property
    def groups(self) -> list[str]:
        return [row.group for row in self.rows]

    def where(self, keep: Callable[[Row, float], bool]) -> npt.NDArray[np.int64]:
        return np.flatnonzero([keep(row, tokens) for row, tokens in zip(self.rows, self.tokens, strict=True)])


def measured(
    scores: Scores, labels: Labels, groups: Sequence[str], seed: int, rounds: int, benign_from: str = "itself"
) -> Measured:
    drawn = bootstrap(labels, groups, seed, rounds)

    def pair(measure: Callable[[Scores, Labels], float]) -> tuple[float, tuple[float, float]]:
        return measure(scores, labels), _pair(interval(lambda i: measure(scores[i], labels[i]), drawn))

    area, area_interval = pair(auroc)
    precision, precision_interval = pair(lambda s, y: float(average_precision_score(y, s)))
    caught, caught_interval = pair(lambda s, y: tpr_at_fpr(s, y, 0.01))
    strict, strict_interval = pair(lambda s, y: tpr_at_fpr(s, y, 0.001))
    return Measured(
        benign=int((labels == 0).sum()),
        attack=int((labels == 1).sum()),
        auroc=area,
        auroc_interval=area_interval,
        auprc=precision,
        auprc_interval=precision_interval,
        tpr_1pct=caught,
        tpr_1pct_interval=caught_interval,
        tpr_0_1pct=strict,
        tpr_0_1pct_interval=strict_interval,
        benign_from=benign_from,
    )


def report_of(
    rated: Rated,
    thresholds: Mapping[str, float],
    seed: int,
    left_out: dict[str, Measured] | None = None,
    remarks: Sequence[str] = (),
) -> DetectorReport:
    """Everything about one detector. ``rated``: its scores on held-out rows, those of positions among them."""
    plain = rated.where(lambda row, _: row.source != POSITIONS)
    kept = Rated([rated.rows[i] for i in plain], rated.scores[plain], rated.tokens[plain])
    slices: dict[str, dict[str, Measured]] = {}
    for kind, name, index, whose in _slices(rated, kept):
        slices.setdefault(kind, {})[name] = measured(
            rated.scores[index],
            rated.labels[index],
            [rated.groups[i] for i in index],
            seed,
            SLICE_ROUNDS,
            whose,
        )
    return DetectorReport(
        pooled=measured(kept.scores, kept.labels, kept.groups, seed, 1000),
        slices=slices,
        thresholds={name: at_threshold(rated, kept, value) for name, value in thresholds.items()},
        curve=curve_of(kept),
        left_out=left_out or {},
        remarks=tuple(remarks),
    )


def at_threshold(rated: Rated, kept: Rated, value: float) -> AtThreshold:
    def hits(index: npt.NDArray[np.int64]) -> Hits:
        hit = rated.scores[index] >= value
        different = len({rated.groups[i] for i in index})
        around = _pair(share_interval(float(hit.mean()), different)) if len(index) else (0.0, 1.0)
        return Hits(len(index), int(hit.sum()), around, different)

    benign: dict[str, Hits] = {}
    attack: dict[str, Hits] = {}
    for name, keep in _named(rated):
        for label, found in (("benign", benign), ("attack", attack)):
            index = rated.where(lambda row, tokens, k=keep, y=label: row.label == y and k(row, tokens))  # type: ignore[misc]
            if len(index) >= LEAST_MEASURED:
                found[name] = hits(index)
    everything = [
        rated.where(lambda row, _, y=label: row.source != POSITIONS and row.label == y)  # type: ignore[misc]
        for label in ("benign", "attack")
    ]
    return AtThreshold(value, hits(everything[0]), hits(everything[1]), benign, attack)


def curve_of(rated: Rated) -> Curve:
    false, true, _ = roc_curve(rated.labels, rated.scores)
    at = np.unique(np.linspace(0, len(false) - 1, min(CURVE_POINTS, len(false))).round().astype(int))
    ranks = np.argsort(np.argsort(rated.scores, kind="stable"), kind="stable") * BINS // len(rated.scores)
    counts = [np.bincount(ranks[rated.labels == label], minlength=BINS) for label in (0, 1)]
    return Curve(
        [(round(float(false[i]), 5), round(float(true[i]), 5)) for i in at],
        [int(n) for n in counts[0]],
        [int(n) for n in counts[1]],
    )


def as_json(report: DetectorReport) -> dict[str, Any]:
    return asdict(report)


def bucket_of(tokens: float) -> str:
    for low, high in pairwise(LENGTHS):
        if low <= tokens < high:
            return f"{low} to {high - 1} tokens"
    return f"from {LENGTHS[-1]} tokens"


def _named(rated: Rated) -> Iterator[tuple[str, Callable[[Row, float], bool]]]:
    """Slices by name, of rows of either label."""
    yield "hard negatives", lambda row, _: row.hard
    for source in sorted({row.source for row in rated.rows}):
        yield f"set {source}", lambda row, _, s=source: row.source == s  # type: ignore[misc]
    for lang in sorted({row.lang for row in rated.rows if row.source != POSITIONS}):
        yield f"language {lang}", lambda row, _, one=lang: row.lang == one and row.source != POSITIONS  # type: ignore[misc]
    for name in dict.fromkeys(bucket_of(tokens) for tokens in np.sort(rated.tokens)):
        yield f"length {name}", lambda _, tokens, n=name: bucket_of(tokens) == n  # type: ignore[misc]
    for place in ("user", "document", "tool"):
        yield f"place {place}", lambda row, _, p=place: row.place == p and row.source != POSITIONS  # type: ignore[misc]
        for position in ("start", "middle", "end"):
            yield (
                f"place {place}, {position}",
                lambda row, _, p=place, at=position: (row.place, row.position) == (p, at),  # type: ignore[misc]
            )
    for characters in (1200, 5000, 12500, 17500):
        for position in ("start", "middle", "end"):
            yield (
                f"positions, {characters} characters, {position}",
                lambda row, _, c=characters, at=position: (  # type: ignore[misc]
                    row.source == POSITIONS and f"-{c}-" in row.id and row.position == at
                ),
            )


def _slices(rated: Rated, kept: Rated) -> Iterator[tuple[str, str, npt.NDArray[np.int64], str]]:
    """Kind, name, rows, and whose benign rows they are compared with."""
    labels = rated.labels
    benign = rated.where(lambda row, _: row.label == "benign" and row.source != POSITIONS)
    attacks = rated.where(lambda row, _: row.label == "attack" and row.source != POSITIONS)
    for name, keep in _named(rated):
        index = rated.where(keep)
        kind, _, rest = name.partition(" ")
        if name.startswith("positions"):
            continue  # too few rows of each for a curve; counted at thresholds
        own = {label: index[labels[index] == label] for label in (0, 1)}
        if len(own[1]) >= LEAST_MEASURED:
            with_own = len(own[0]) >= LEAST_MEASURED
            compared = own[0] if with_own else benign
            yield kind, rest or kind, np.concatenate([compared, own[1]]), "itself" if with_own else "all"
        elif len(own[0]) >= LEAST_MEASURED:
            yield kind, rest or kind, np.concatenate([own[0], attacks]), "itself, against all attacks"


def _pair(interval_: Interval) -> tuple[float, float]:
    return (interval_.low, interval_.high)
