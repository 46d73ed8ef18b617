"""Which way to look for an attack in a long document, part by part, tells attacked documents from benign ones.

``python -m detectors.calibration.measure_windows --out bench/results/smollm2-135m-windows.json`` measures and records.
Heads, sizes and thresholds are chosen on one half of documents and of attacks' wordings; the other half, and the set
``positions``, are measured once. Candidates: what the attention of one pass over the whole document puts on each
stretch of it (``stretches``); passes of instruction and one window each, read by the detectors that ship; and such
passes read by a probe that is fitted to the benign windows of the choosing half too, beside the rows that the shipped
one was fitted to.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from detectors.attention_tracker import AttentionTracker, focus_scores
from detectors.calibration.evaluation import measured
from detectors.calibration.logistic import fit
from detectors.calibration.long_documents import Case, cases, cases_hash
from detectors.calibration.long_readings import LongReader, ReadWindow
from detectors.calibration.material import Material, Request, gather
from detectors.calibration.metrics import Labels, Scores, auroc, threshold_for_fpr
from detectors.calibration.positions import SOURCE
from detectors.calibration.provenance import versions
from detectors.calibration.sets.long_benign import long_documents
from detectors.calibration.split import merge_beside
from detectors.calibration.stretches import (
    Array,
    Found,
    Index,
    centred,
    choose_heads,
    found_by,
    profile_of,
    scalings,
    stretches_of,
)
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
PARTS = ("choosing", "held_out", SOURCE)
REGULARISATION = 1e-3
"""Of the fit to windows: the shipped probe's."""
ROUNDS = 300


@dataclass(frozen=True)
class Candidate:
    """``chosen``: what was chosen, and on what; ``thresholds``: that were set on other rows than these."""

    name: str
    found: Found
    chosen: Mapping[str, Any] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """Cases with what was read of them; ``size``: of windows."""

    size: Windows
    cases: Sequence[Case]
    reader: LongReader
    probe: Probe
    tracker: AttentionTracker
    named: Mapping[str, Probe] = field(default_factory=dict)
    """Further probes by their file's name, which read the same layers."""

    @property
    def labels(self) -> Labels:
        return np.array([bool(case.attack) for case in self.cases], np.int64)

    def of(self, *halves: str) -> Index:
        return np.flatnonzero([case.half in halves for case in self.cases])

    def whole(self) -> Iterator[Candidate]:
        """The detectors as they ship, without windows."""
        none = np.zeros(len(self.cases))
        wholes = [self.reader.whole(case) for case in self.cases]
        probed = _probabilities(self.probe, np.stack([one.last for one in wholes]))
        yield Candidate("no windows: probe", Found(probed, none, none), thresholds=self.probe.thresholds)
        drift = self._tracker(np.stack([one.mass for one in wholes])).mean(axis=1)
        yield Candidate("no windows: attention_tracker", Found(drift, none, none), thresholds=self.tracker.thresholds)

    def as_served(self) -> Iterator[Candidate]:
        """The detectors that ship, with windows: the highest of the whole document's score and its windows'."""
        windows = {one.name.rpartition(": ")[2]: one for one in self.in_passes() if one.thresholds}
        for one in self.whole():
            kind = one.name.rpartition(": ")[2]
            beside = windows[kind].found
            found = Found(np.maximum(one.found.scores, beside.scores), beside.hit, beside.chance)
            yield Candidate(f"with windows, as served: {kind}", found, thresholds=one.thresholds)
        passes, wholes = self.passes(), np.stack([self.reader.whole(case).last for case in self.cases])
        overlaps = [np.array([one.overlap for one in of_one]) for of_one in passes]
        for name, probe in self.named.items():
            beside = found_by([_probabilities(probe, _states(of_one)) for of_one in passes], overlaps)
            found = Found(np.maximum(_probabilities(probe, wholes), beside.scores), beside.hit, beside.chance)
            yield Candidate(f"with windows, as served: {name}", found, thresholds=probe.thresholds)

    def in_one_pass(self) -> Iterator[Candidate]:
        """Of the whole document, by stretches of it."""
        wholes = [self.reader.whole(case) for case in self.cases]
        benign = [i for i in self.of("choosing") if not self.labels[i]]
        for tokens in STRETCHES:
            every = [stretches_of(whole, tokens) for whole in wholes]
            for name, scaling in scalings(profile_of([every[i] for i in benign])).items():
                overlaps = [one.overlap for one in every]
                yield self._with_heads(f"one pass, {tokens} tokens: {name}", [scaling(one) for one in every], overlaps)

    def in_passes(self) -> Iterator[Candidate]:
        """Each window in a pass of its own, read by the detectors that ship."""
        named, passes = f"passes, {self.size.characters} characters: ", self.passes()
        overlaps = [np.array([one.overlap for one in of_one]) for of_one in passes]
        yield self.probed()
        probed = [centred(_logit(_probabilities(self.probe, _states(of_one)))) for of_one in passes]
        yield Candidate(f"{named}probe against the document's median", found_by(probed, overlaps))
        masses = [np.stack([one.reading.mass for one in of_one]) for of_one in passes]
        drift = [self._tracker(mass).mean(axis=1) for mass in masses]
        shipped = self.tracker.thresholds
        yield Candidate(f"{named}attention_tracker", found_by(drift, overlaps), thresholds=shipped)
        against = found_by([centred(one) for one in drift], overlaps)
        yield Candidate(f"{named}attention_tracker against the document's median", against)
        every = [_drift(mass) for mass in masses]
        yield self._with_heads(f"{named}attention_tracker, heads chosen here", every, overlaps)

    def probed(self) -> Candidate:
        passes = self.passes()
        overlaps = [np.array([one.overlap for one in of_one]) for of_one in passes]
        found = found_by([_probabilities(self.probe, _states(of_one)) for of_one in passes], overlaps)
        return Candidate(f"passes, {self.size.characters} characters: probe", found, {}, self.probe.thresholds)

    def fitted_too(self, material: Material) -> Candidate:
        """By a probe that the benign windows of the choosing half were fitted to too; its threshold is set on the
        benign held-out rows of ``material``, which are no long documents. On the choosing half it flatters itself."""
        passes, labels, rows = self.passes(), self.labels, material.rows
        benign = np.concatenate([_states(passes[i]) for i in self.of("choosing") if not labels[i]])
        layers = [material.features.layers.index(layer) for layer in self.probe.config.params.layers]
        states = material.features.hidden[:, layers].reshape(len(rows), -1).astype(np.float64)
        seen = np.flatnonzero([row.split != "held_out" for row in rows])
        unseen = np.flatnonzero([row.split == "held_out" for row in rows])
        of_rows = np.array([row.label == "attack" for row in rows], np.int64)
        fitted = fit(
            np.concatenate([states[seen], benign.reshape(len(benign), -1).astype(np.float64)]),
            np.concatenate([of_rows[seen], np.zeros(len(benign), np.int64)]),
            REGULARISATION,
        )
        of_unseen = fitted.logits(states[unseen])
        overlaps = [np.array([one.overlap for one in of_one]) for of_one in passes]
        scores = [fitted.logits(_states(one).reshape(len(one), -1).astype(np.float64)) for one in passes]
        chosen = {
            "benign_windows": len(benign),
            "auroc_on_held_out_rows": auroc(of_unseen, of_rows[unseen]),
            "caught_on_held_out_rows_at_1pct": float(
                np.mean(of_unseen[of_rows[unseen] == 1] >= threshold_for_fpr(of_unseen[of_rows[unseen] == 0], 0.01))
            ),
        }
        limits = {"fpr_1pct of held-out rows": threshold_for_fpr(of_unseen[of_rows[unseen] == 0], 0.01)}
        name = f"passes, {self.size.characters} characters: probe fitted to the choosing half's benign windows too"
        return Candidate(name, found_by(scores, overlaps), chosen, limits)

    def passes(self) -> list[list[ReadWindow]]:
        return [self.reader.passes(case, self.size) for case in self.cases]

    def _with_heads(self, name: str, values: Sequence[Array], overlaps: Sequence[Array]) -> Candidate:
        """values: of each case ``[stretches, heads]``."""
        choosing = self.of("choosing")
        documents = [self.cases[i].document for i in choosing]
        heads, merit = choose_heads([values[i] for i in choosing], self.labels[choosing], documents)
        chosen = {"heads": [list(self.reader.heads[i]) for i in heads], "choosing_out_of_fold_auroc": merit}
        return Candidate(name, found_by([one[:, heads].mean(axis=1) for one in values], overlaps), chosen)

    def _tracker(self, mass: FloatArray) -> Array:
        """``[rows, heads]``."""
        return _drift(mass[:, [self.reader.heads.index(head) for head in self.tracker.heads]])


def _probabilities(probe: Probe, last: FloatArray) -> Scores:
    """last: ``[rows, layers, hidden_size]``, of the probe's layers."""
    logits = last.reshape(len(last), -1).astype(np.float64) @ probe.weight + probe.bias
    return np.asarray(1 / (1 + np.exp(-logits)))


def _states(passes: Sequence[ReadWindow]) -> FloatArray:
    """``[windows, layers, hidden_size]``"""
    return np.stack([one.reading.last for one in passes])


def _drift(mass: FloatArray) -> Array:
    """mass: ``[rows, heads, 2]``."""
    return np.asarray(1 - focus_scores(mass[..., 0].astype(np.float64), mass[..., 1].astype(np.float64)))


def _logit(share: Scores) -> Scores:
    clipped = np.clip(share, 1e-12, 1 - 1e-12)
    return np.asarray(np.log(clipped / (1 - clipped)))


def recorded(measure: Measure, one: Candidate, seed: int) -> dict[str, Any]:
    """What is recorded of a candidate, by part."""
    labels, scores = measure.labels, one.found.scores
    choosing = measure.of("choosing")
    five = threshold_for_fpr(scores[choosing][labels[choosing] == 0], 0.05)
    limits = {"5 % of the choosing half's benign documents": five, **one.thresholds}
    told: dict[str, Any] = {"chosen": dict(one.chosen)} if one.chosen else {}
    for part in PARTS:
        at = measure.of(part)
        attack, benign = at[labels[at] == 1], at[labels[at] == 0]
        documents = [measure.cases[i].document for i in at]
        figures = asdict(measured(scores[at], labels[at], documents, seed, ROUNDS))
        figures["tpr_5pct"] = float(np.mean(scores[attack] >= threshold_for_fpr(scores[benign], 0.05)))
        figures["top_is_the_attack"] = float(one.found.hit[attack].mean())
        figures["top_by_chance"] = float(one.found.chance[attack].mean())
        figures["reach"] = {
            name: {
                "value": value,
                "benign": int((scores[benign] >= value).sum()),
                "attack": int((scores[attack] >= value).sum()),
            }
            for name, value in limits.items()
        }
        told[part] = figures
    return told


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-fit", action="store_true", help="do not read the sets' rows, and fit no probe")
    parser.add_argument("--served-alone", action="store_true", help="measure detectors as they are served, no more")
    parser.add_argument("--named", action="append", default=[], help="measure this file of probe too, NAME.json")
    parser.add_argument("--configs", type=Path, help="folder with KIND/NAME.json; those that ship, if not given")
    given = parser.parse_args(arguments)
    resolved = resolve_model(given.model)
    model = Path(resolved.path)
    named = probes_named(given.configs or data_folder("model_configs"), given.named)
    measure, left_out, merits = _read(model, resolved.config_key, given.seed, named)
    served = (*measure.whole(), *measure.as_served())
    candidates = {}
    for one in served if given.served_alone else _every(measure, served, given):
        told = candidates[one.name] = recorded(measure, one, given.seed)
        say(f"{one.name}: AUROC " + ", ".join(f"{part} {told[part]['auroc']:.3f}" for part in PARTS))
    labels = measure.labels
    about = {
        "model": resolved.config_key,
        "model_sha256": weights_sha256(model),
        "command": f"python -m detectors.calibration.measure_windows --model {given.model} --seed {given.seed}"
        + (" --without-fit" if given.without_fit else "")
        + (" --served-alone" if given.served_alone else "")
        + "".join(f" --named {name}" for name in given.named),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "cases": {
            part: {name: int((labels[measure.of(part)] == y).sum()) for name, y in (("benign", 0), ("attack", 1))}
            for part in PARTS
        },
        **left_out,
        "cases_sha256": cases_hash(measure.cases),
        **({"named": {name: _recorded_parts(one) for name, one in named.items()}} if named else {}),
        "windows": {**measure.size.model_dump(), "chosen_by_the_probes_auroc_on_the_choosing_half": merits},
    }
    given.out.write_text(json.dumps({"about": about, "candidates": candidates}, indent=1) + "\n", encoding="utf-8")


def _every(measure: Measure, served: Sequence[Candidate], given: argparse.Namespace) -> Iterator[Candidate]:
    yield from served
    yield from measure.in_passes()
    if not given.without_fit:
        yield measure.fitted_too(gather(Request(measure.reader.model, ("all",), given.seed), say))
    yield from measure.in_one_pass()


def probes_named(configs: Path, names: Sequence[str]) -> dict[str, Probe]:
    found = {name: build_detector("probe", configs / "probe" / f"{name}.json") for name in names}
    return {name: one for name, one in found.items() if isinstance(one, Probe)}


def _read(
    model: Path, key: str, seed: int, named: Mapping[str, Probe]
) -> tuple[Measure, dict[str, list[str]], dict[str, float]]:
    """What is measured, the documents that are left out, and how each size of windows fared."""
    configs = data_folder("model_configs")
    probe = build_detector("probe", configs / "probe" / f"{key}.json")
    tracker = build_detector("attention_tracker", configs / "attention_tracker" / f"{key}.json")
    assert isinstance(probe, Probe)
    assert isinstance(tracker, AttentionTracker)
    for name, one in named.items():
        if one.config.params.layers != probe.config.params.layers:
            raise SystemExit(f"{name} reads other layers than {key}, which are those that are read here")
    reader = LongReader(model, probe.config.params.layers)
    every = cases(seed)
    too_long = {case.document for case in every if not reader.fits(case)}
    like = like_long_documents(every) if named else set[str]()
    kept = [case for case in every if case.document not in too_long | like]
    choosing = [case for case in kept if case.half == "choosing"]
    reader.read(choosing, SIZES, say)
    tried = [Measure(size, choosing, reader, probe, tracker) for size in SIZES]
    merits = [auroc(one.probed().found.scores, one.labels) for one in tried]
    size = SIZES[int(np.argmax(merits))]
    reader.read(kept, (size,), say)
    by_size = {str(one.characters): merit for one, merit in zip(SIZES, merits, strict=True)}
    left_out = {"documents_too_long_for_the_engine": sorted(too_long)}
    if named:
        left_out["documents_like_some_of_long_documents"] = sorted(like)
    return Measure(size, kept, reader, probe, tracker, named), left_out, by_size


def _recorded_parts(probe: Probe) -> dict[str, Any]:
    """What its file says of the documents that it was measured on."""
    made = probe.config.calibration
    if made is None:
        return {}
    return {
        "command": made.command,
        "thresholds": dict(probe.thresholds),
        "parts": {name: part.model_dump() for name, part in made.parts.items()},
    }


def like_long_documents(every: Sequence[Case]) -> set[str]:
    """Documents that are nearly the same as one of the set ``long-documents``, to which probes with windows are
    fitted."""
    benign = [case for case in every if not case.attack]
    names = [case.document for case in benign]
    _, near = merge_beside([case.row.text for case in benign], names, [one.text for one in long_documents()])
    return {name for name, alike in zip(names, near, strict=True) if alike}


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
