"""``guard calibrate probe --windows``: from rows and long documents to a probe that reads long data in windows.

Owns the order of the steps: everything is checked before an engine starts; layers are those that the rows alone choose,
as without windows; then windows are read at these layers, and the probe is fitted to them too. Held-out rows, held-out
documents and the set ``positions`` are looked at once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from detectors.calibration.baseline import baseline_scores, fit_baseline
from detectors.calibration.data import ALL, knows_tool_role, short_enough, template_of
from detectors.calibration.evaluation import POSITIONS
from detectors.calibration.feature_store import FeatureStore, Plan
from detectors.calibration.features import most_tokens, read_features
from detectors.calibration.fit_probe import FittedProbe, fit_probe, probe_files
from detectors.calibration.fit_windows import LEAST_DOCUMENTS, FittedWindows, Served, fit_windows
from detectors.calibration.fitted import Fitted, Job, Scored, calibration
from detectors.calibration.logistic import Matrix
from detectors.calibration.long_rows import LongRow, long_rows, own_long_rows
from detectors.calibration.material import Material, Request, engine_of, gather, reader_of
from detectors.calibration.metrics import Labels, Scores, Tried, share_interval, threshold, values_within_budgets
from detectors.calibration.probe_candidates import Choice, LabelledRows
from detectors.calibration.provenance import data_sources
from detectors.calibration.rows import Row
from detectors.calibration.seen_rows import seen_digests
from detectors.calibration.sets.long_benign import packages
from detectors.calibration.sources import DataError
from detectors.calibration.wheels import pull
from detectors.calibration.window_rows import window_rows
from detectors.linear import sigmoid
from detectors.model_config import Reached, Threshold
from detectors.probe import ProbeConfig
from detectors.windows import Windows, passes_of

WINDOWS = Windows()
SUFFIX = "-windows"
"""Of the file's name, behind the model's: it is another detector than the one without."""


def windows_key(config_key: str) -> str:
    return f"{config_key}{SUFFIX}"


@dataclass(frozen=True)
class _Rows:
    """Usual rows, without those that are documents here. short: those that have no windows, and so are scored whole."""

    rows: Sequence[Row]
    states: Matrix
    short: np.ndarray[tuple[int], np.dtype[np.bool_]]

    def where(self, *splits: str) -> _Rows:
        at = np.flatnonzero([row.split in splits for row in self.rows])
        return _Rows([self.rows[i] for i in at], self.states[at], self.short[at])

    @property
    def labels(self) -> Labels:
        return np.array([row.label == "attack" for row in self.rows], np.int64)

    @property
    def groups(self) -> list[str]:
        return [row.group for row in self.rows]


@dataclass(frozen=True)
class _Documents:
    """Rows read whole and in windows, with what each is."""

    rows: Sequence[LongRow]
    served: Served

    @property
    def groups(self) -> list[str]:
        return [one.row.group for one in self.rows]

    def tried(self, scores: Scores) -> Tried:
        return Tried(scores, np.zeros(len(scores), np.int64), self.groups)


def fit_with_windows(
    job: Job,
    request: Request,
    say: Callable[[str], None] = lambda _: None,
    total: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] | None = None,
) -> Fitted:
    """Raises ``DataError``, also where there are too few long documents, and ``FeatureError``."""
    documents = _documents(request, say)
    asked = replace(request, kinds=("probe",), with_positions=ALL in request.data)
    material = gather(asked, say, total, progress)
    documents += own_long_rows(material.rows, WINDOWS)
    _check(documents)
    taken = {one.row.id for one in documents}
    usual = [i for i, row in enumerate(material.rows) if row.source != POSITIONS and row.id not in taken]
    say("choosing layers for the probe")
    plain = _without_windows(material, usual, job.seed)
    choice = plain.choice
    rows = _Rows(
        [material.rows[i] for i in usual],
        choice.columns(material.features.part(usual)),
        np.array([not passes_of(material.rows[i].messages, WINDOWS)[0] for i in usual], np.bool_),
    )
    buried = [
        LongRow(row, row.position or "none", row.group)
        for row in material.rows
        if row.source == POSITIONS and row.place == "document"
    ]
    parts = (
        [one for one in documents if one.fitted],
        [one for one in documents if not one.fitted],
        buried,
    )
    fitted_to, unseen, attacked = _read(request, material, choice, parts, say, total, progress)
    say("fitting the probe to rows and windows")
    seen = rows.where("train", "validation")
    packages_of = [one.package for one in fitted_to.rows]
    fitted = fit_windows(
        seen.states, seen.labels, seen.groups, fitted_to.served, packages_of, plain.regularisation, job.seed
    )
    return _written(job, plain, fitted, rows, fitted_to, unseen, attacked)


def _documents(request: Request, say: Callable[[str], None]) -> list[LongRow]:
    """The set's that the engine takes."""
    for name in packages():
        pull(name)
    tokenizer = template_of(request.model)
    documents = long_rows(request.seed, knows_tool_role(tokenizer))
    fit = {row.id for row in short_enough([one.row for one in documents], tokenizer, most_tokens(request.model), say)}
    return [one for one in documents if one.row.id in fit]


def _check(documents: Sequence[LongRow]) -> None:
    for fitted, what in ((True, "to fit and set thresholds on"), (False, "to measure on")):
        different = len({one.row.group for one in documents if one.fitted == fitted})
        if different < LEAST_DOCUMENTS:
            raise DataError(
                f"{different} different long benign documents {what}, at least {LEAST_DOCUMENTS} are needed; give "
                "--data with more benign rows that are longer than a window"
            )


def _without_windows(material: Material, usual: Sequence[int], seed: int) -> FittedProbe:
    """The probe whose layers and penalty are taken."""

    def part(split: str) -> LabelledRows:
        at = [i for i in usual if material.rows[i].split == split]
        labels = np.array([material.rows[i].label == "attack" for i in at], np.int64)
        return LabelledRows(material.features.part(at), labels, [material.rows[i].group for i in at])

    return fit_probe(part("train"), part("validation"), seed)


def _read(
    request: Request,
    material: Material,
    choice: Choice,
    parts: Sequence[Sequence[LongRow]],
    say: Callable[[str], None],
    total: Callable[[int], None],
    progress: Callable[[int], None] | None,
) -> list[_Documents]:
    """Each part's rows and their windows, at the layers of ``choice``. Of rows of ``material`` the whole was read."""
    engine = engine_of(request, say)
    plan = Plan(choice.layers, engine.plan.heads, (), 0)
    there = {row.id for row in material.rows}
    of_parts = [window_rows([one.row for one in part], range(len(part)), WINDOWS) for part in parts]
    lacking = [one.row for part in parts for one in part if one.row.id not in there]
    everything = [*lacking, *(row for one in of_parts for row in one.rows)]
    say(f"reading {len(lacking)} long documents, and {len(everything) - len(lacking)} windows of long rows")
    total(len(everything))
    read = read_features(
        everything,
        FeatureStore(engine.model_key, plan),
        lambda: reader_of(request, engine, plan, (), say),
        progress,
    )
    states = choice.columns(read)
    whole = dict(zip((row.id for row in material.rows), choice.columns(material.features), strict=True))
    whole |= dict(zip((row.id for row in lacking), states, strict=False))
    found, at = list[_Documents](), len(lacking)
    for part, of_part in zip(parts, of_parts, strict=True):
        end = at + len(of_part.rows)
        wholes = np.array([whole[one.row.id] for one in part]).reshape(len(part), states.shape[1])
        found.append(_Documents(part, Served(wholes, states[at:end], of_part)))
        at = end
    return found


def _written(
    job: Job,
    plain: FittedProbe,
    fitted: FittedWindows,
    rows: _Rows,
    fitted_to: _Documents,
    unseen: _Documents,
    attacked: _Documents,
) -> Fitted:
    """With what its scores are on rows that it was not fitted to."""
    seen, held_out = rows.where("train", "validation"), rows.where("held_out")
    keyed = replace(job, config_key=windows_key(job.config_key))
    hidden_size = len(fitted.linear.weight) // len(plain.layers)
    params, weights = probe_files(plain.choice, fitted.linear, keyed.config_key, hidden_size)
    params = params.model_copy(update={"windows": WINDOWS})

    setting = Tried(
        np.asarray(sigmoid(fitted.of_rows[seen.short])),
        seen.labels[seen.short],
        [group for group, short in zip(seen.groups, seen.short, strict=True) if short],
    )
    of_documents = fitted_to.tried(np.asarray(sigmoid(fitted.of_documents)))
    values = values_within_budgets(setting, of_documents)

    short = [row for row, is_short in zip(held_out.rows, held_out.short, strict=True) if is_short]
    measured = [*short, *(one.row for one in unseen.rows)]
    of_unseen = np.asarray(sigmoid(unseen.served.scores(fitted.linear)))
    scores = np.concatenate([sigmoid(fitted.linear.logits(held_out.states[held_out.short])), of_unseen])
    scored = _scored(measured, scores)
    set_on, tried = _joined(setting, of_documents), Tried(scored.scores, scored.labels, scored.alike)
    points = {name: threshold(value, set_on, tried) for name, value in values.items()}

    train, validation = rows.where("train"), rows.where("validation")
    text = fit_baseline(_texts(train.rows), train.labels, _texts(validation.rows), validation.labels)
    all_rows = [*rows.rows, *(one.row for one in (*fitted_to.rows, *unseen.rows))]
    made = calibration(
        keyed,
        "logistic regression, read in windows too",
        data_sources(all_rows),
        _choices(plain, seen, fitted_to, len(short)),
        points,
        scored,
        _scored(measured, baseline_scores(text, _texts(measured))),
        seen_digests([*rows.rows, *(one.row for one in fitted_to.rows)]),
    )
    parts = _parts(points, fitted_to, of_documents.scores, unseen, of_unseen)
    if attacked.rows:
        parts |= _buried(points, attacked, np.asarray(sigmoid(attacked.served.scores(fitted.linear))))
    config = ProbeConfig(model_info=job.model_info, params=params, calibration=made.model_copy(update={"parts": parts}))
    return Fitted(config, {params.weights: weights})


def _choices(plain: FittedProbe, seen: _Rows, fitted_to: _Documents, held_out_short: int) -> dict[str, str]:
    count = len({one.package for one in fitted_to.rows})
    return {
        "layers and regularisation": f"of the probe without windows, fitted to the rows alone: {list(plain.layers)}, "
        f"C={plain.regularisation:g}",
        "weights": f"{len(seen.rows)} training and validation rows whole, {len(fitted_to.rows)} benign documents of "
        f"{count} packages whole and {len(fitted_to.served.of_windows)} windows of them",
        "calibration": "Platt scaling on out-of-fold logits of the rows, equal class sizes",
        "thresholds": f"on out-of-fold scores of the {int(seen.short.sum())} rows that are no longer than a window, "
        "and of the documents as served: each budget is kept among the rows alone and among the documents alone",
        "held out": f"{held_out_short} rows that are no longer than a window, and the documents of other packages as "
        "served; longer rows are measured by guard eval. The set positions, of held-out attacks, is in parts alone",
    }


def _joined(rows: Tried, documents: Tried) -> Tried:
    return Tried(
        np.concatenate([rows.scores, documents.scores]),
        np.concatenate([rows.labels, documents.labels]),
        [*(rows.groups or ()), *(documents.groups or ())],
    )


def _scored(rows: Sequence[Row], scores: Scores) -> Scored:
    groups = [row.group for row in rows]
    labels = np.array([row.label == "attack" for row in rows], np.int64)
    return Scored(scores, labels, groups, [row.source for row in rows], alike=groups)


def _texts(rows: Sequence[Row]) -> list[str]:
    return [row.text for row in rows]


def _parts(
    points: dict[str, Threshold], fitted_to: _Documents, out_of_fold: Scores, unseen: _Documents, scores: Scores
) -> dict[str, Reached]:
    found = {"benign documents of packages that were fitted to, out of fold": (out_of_fold, fitted_to.groups)}
    kinds = sorted({one.kind for one in unseen.rows})
    for kind in kinds:
        at = [i for i, one in enumerate(unseen.rows) if one.kind == kind]
        found[f"benign documents, {kind}"] = (scores[at], [unseen.groups[i] for i in at])
    found["benign documents"] = (scores, unseen.groups)
    return {name: _reached(points, *one) for name, one in found.items()}


def _buried(points: dict[str, Threshold], attacked: _Documents, scores: Scores) -> dict[str, Reached]:
    found = {}
    for place in ("none", "start", "middle", "end"):
        at = [i for i, one in enumerate(attacked.rows) if one.kind == place]
        name = f"{POSITIONS}, benign" if place == "none" else f"{POSITIONS}, attack at the {place}"
        found[name] = _reached(points, scores[at], [attacked.groups[i] for i in at])
    return found


def _reached(points: dict[str, Threshold], scores: Scores, groups: Sequence[str]) -> Reached:
    different = len(set(groups))
    hit = {name: scores >= point.value for name, point in points.items()}
    return Reached(
        rows=len(scores),
        different=different,
        hits={name: int(one.sum()) for name, one in hit.items()},
        intervals={name: share_interval(float(one.mean()), different) for name, one in hit.items()},
    )
