"""Which way to look for an attack in a long document, stretch by stretch, tells attacked documents from benign ones.

``python -m detectors.calibration.measure_windows --out bench/results/smollm2-135m-windows.json`` measures and records.
Heads, sizes and thresholds are chosen on one half of documents and of attacks' wordings; the other half, and the set
``positions``, are measured once. Candidates: what the attention of one pass over the whole document puts on each
stretch of it, in several scalings; and passes of instruction and one window each, read by the detectors that ship.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata  # type: ignore[import-untyped]

from detectors.attention_tracker import AttentionTracker, focus_scores
from detectors.calibration.evaluation import measured
from detectors.calibration.long_documents import Case, cases, cases_hash
from detectors.calibration.long_readings import LongReader, Whole
from detectors.calibration.metrics import Labels, Scores, auroc, threshold_for_fpr
from detectors.calibration.positions import SOURCE
from detectors.calibration.provenance import versions
from detectors.probe import Probe
from detectors.registry import build_detector
from detectors.windows import Windows
from guard.data import data_folder
from guard.mia.results import FloatArray
from guard.model_weights import weights_sha256
from guard.models import resolve_model

STRETCHES = (64, 128, 256)
"""Tokens."""
SIZES = (Windows(characters=400, stride=200, most=1024), Windows(characters=800, stride=400, most=1024))
HEADS = (1, 2, 4, 8, 16)
BINS = 8
"""Of a stretch's distance from the prompt's end, on a logarithmic scale."""
EPSILON = 1e-9
ROUNDS = 300

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
        "the same, against the document's median": lambda one: _centred(density(one) - profile(one)),
    }


def _centred(values: Array) -> Array:
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
    folds = np.array([names.index(document) % 4 for document in documents])
    tried: dict[int, float] = {}
    for count in HEADS:
        scores = np.zeros(len(values))
        for fold in range(4):
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


@dataclass(frozen=True)
class Measure:
    """Cases with what was read of them. ``choosing``: numbers of those to choose on."""

    cases: Sequence[Case]
    reader: LongReader
    probe: Probe
    tracker: AttentionTracker

    @property
    def labels(self) -> Labels:
        return np.array([bool(case.attack) for case in self.cases], np.int64)

    def of(self, *halves: str) -> Index:
        return np.flatnonzero([case.half in halves for case in self.cases])

    def in_one_pass(self) -> Iterator[tuple[str, Found, dict[str, Any]]]:
        """Name, scores of all cases, and what was chosen."""
        wholes = [self.reader.whole(case) for case in self.cases]
        choosing, labels = self.of("choosing"), self.labels
        documents = [self.cases[i].document for i in choosing]
        for tokens in STRETCHES:
            every = [stretches_of(whole, tokens) for whole in wholes]
            overlaps = [one.overlap for one in every]
            benign = [every[i] for i in choosing if not labels[i]]
            for name, scaling in scalings(profile_of(benign)).items():
                values = [scaling(one) for one in every]
                heads, merit = choose_heads([values[i] for i in choosing], labels[choosing], documents)
                found = found_by([one[:, heads].mean(axis=1) for one in values], overlaps)
                chosen = {"heads": [list(self.reader.heads[i]) for i in heads], "choosing_out_of_fold_auroc": merit}
                yield f"one pass, {tokens} tokens: {name}", found, chosen

    def whole(self) -> Iterator[tuple[str, Found, dict[str, Any]]]:
        """The detectors as they ship, without windows."""
        none = np.zeros(len(self.cases))
        wholes = [self.reader.whole(case) for case in self.cases]
        last, mass = np.stack([one.last for one in wholes]), np.stack([one.mass for one in wholes])
        yield "no windows: probe", Found(self._probe(last), none, none), {}
        yield "no windows: attention_tracker", Found(self._tracker(mass).mean(axis=1), none, none), {}

    def in_passes(self) -> Iterator[tuple[str, Found, dict[str, Any]]]:
        """Each window in a pass of its own."""
        choosing, labels = self.of("choosing"), self.labels
        documents = [self.cases[i].document for i in choosing]
        for size in SIZES:
            named = f"passes, {size.characters} characters: "
            passes = [self.reader.passes(case, size) for case in self.cases]
            overlaps = [np.array([one.overlap for one in of_one]) for of_one in passes]
            probed = [self._probe(np.stack([one.reading.last for one in of_one])) for of_one in passes]
            masses = [np.stack([one.reading.mass for one in of_one]) for of_one in passes]
            yield named + "probe", found_by(probed, overlaps), {}
            yield (
                named + "probe against the document's median",
                found_by([_centred(_logit(p)) for p in probed], overlaps),
                {},
            )
            shipped = [self._tracker(mass).mean(axis=1) for mass in masses]
            yield named + "attention_tracker", found_by(shipped, overlaps), {}
            yield (
                named + "attention_tracker against the document's median",
                found_by([_centred(s) for s in shipped], overlaps),
                {},
            )
            drift = [
                1 - focus_scores(mass[..., 0].astype(np.float64), mass[..., 1].astype(np.float64)) for mass in masses
            ]
            heads, merit = choose_heads([drift[i] for i in choosing], labels[choosing], documents)
            chosen = {"heads": [list(self.reader.heads[i]) for i in heads], "choosing_out_of_fold_auroc": merit}
            yield (
                named + "attention_tracker, heads chosen here",
                found_by([d[:, heads].mean(axis=1) for d in drift], overlaps),
                chosen,
            )

    def _probe(self, last: FloatArray) -> Scores:
        """last: ``[rows, layers, hidden_size]``, of the probe's layers."""
        logits = last.reshape(len(last), -1).astype(np.float64) @ self.probe.weight + self.probe.bias
        return np.asarray(1 / (1 + np.exp(-logits)))

    def _tracker(self, mass: FloatArray) -> Array:
        """``[rows, heads]``."""
        at = [self.reader.heads.index(head) for head in self.tracker.heads]
        chosen = mass[:, at].astype(np.float64)
        return np.asarray(1 - focus_scores(chosen[..., 0], chosen[..., 1]))


def _logit(share: Scores) -> Scores:
    clipped = np.clip(share, 1e-12, 1 - 1e-12)
    return np.asarray(np.log(clipped / (1 - clipped)))


def recorded(measure: Measure, found: Found, chosen: Mapping[str, Any], named: Mapping[str, float], seed: int) -> Any:
    """What is recorded of one candidate. ``named``: thresholds that its detector has, set without windows."""
    labels = measure.labels
    parts = {"choosing": ("choosing",), "held_out": ("held_out",), SOURCE: (SOURCE,)}
    told: dict[str, Any] = {"chosen": dict(chosen)} if chosen else {}
    choosing = measure.of("choosing")
    benign = found.scores[choosing][labels[choosing] == 0]
    limits = {"set on choosing, 5 %": threshold_for_fpr(benign, 0.05), **named}
    for name, halves in parts.items():
        at = measure.of(*halves)
        scores, is_attack = found.scores[at], labels[at] == 1
        groups = [measure.cases[i].document for i in at]
        one = asdict(measured(scores, labels[at], groups, seed, ROUNDS))
        one["tpr_5pct"] = float(np.mean(scores[is_attack] >= threshold_for_fpr(scores[~is_attack], 0.05)))
        one["top_is_the_attack"] = float(found.hit[at][is_attack].mean())
        one["top_by_chance"] = float(found.chance[at][is_attack].mean())
        one["at"] = {
            limit: {
                "value": value,
                "benign": int((scores[~is_attack] >= value).sum()),
                "attack": int((scores[is_attack] >= value).sum()),
            }
            for limit, value in limits.items()
        }
        told[name] = one
    return told


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    resolved = resolve_model(given.model)
    configs, key = data_folder("model_configs"), resolved.config_key
    probe = build_detector("probe", configs / "probe" / f"{key}.json")
    tracker = build_detector("attention_tracker", configs / "attention_tracker" / f"{key}.json")
    assert isinstance(probe, Probe)
    assert isinstance(tracker, AttentionTracker)
    reader = LongReader(Path(resolved.path), probe.config.params.layers)
    every = cases(given.seed)
    longest = {case.document for case in every if not reader.fits(case)}
    kept = [case for case in every if case.document not in longest]
    reader.read(kept, SIZES, lambda line: print(line, flush=True))
    measure = Measure(kept, reader, probe, tracker)
    candidates: dict[str, Any] = {}
    for name, found, chosen in (*measure.whole(), *measure.in_passes(), *measure.in_one_pass()):
        thresholds = (
            probe.thresholds if name.endswith("probe") else tracker.thresholds if name.endswith("tracker") else {}
        )
        candidates[name] = recorded(measure, found, chosen, thresholds, given.seed)
        told = candidates[name]
        print(
            f"{name}: "
            + ", ".join(f"{half} AUROC {told[half]['auroc']:.3f}" for half in ("choosing", "held_out", SOURCE))
        )
    about = {
        "model": key,
        "model_sha256": weights_sha256(reader.model),
        "command": f"python -m detectors.calibration.measure_windows --model {given.model} --seed {given.seed}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "cases": {
            half: {
                "benign": sum(case.half == half and not case.attack for case in kept),
                "attack": sum(case.half == half and bool(case.attack) for case in kept),
            }
            for half in ("choosing", "held_out", SOURCE)
        },
        "too_long_for_the_engine": sorted(longest),
        "cases_sha256": cases_hash(kept),
    }
    given.out.write_text(json.dumps({"about": about, "candidates": candidates}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
