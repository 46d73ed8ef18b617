"""Detectors of injections, from rows and what the model computed on them to fitted detectors.

Owns the order of the steps, and that held-out rows are looked at once, at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load
from sklearn.pipeline import Pipeline  # type: ignore[import-untyped]

from detectors.attention_tracker import AttentionTrackerConfig
from detectors.attention_tracker import Params as TrackerParams
from detectors.calibration.baseline import baseline_scores, fit_baseline, unseen_scores, variant
from detectors.calibration.demands import lacking, readable
from detectors.calibration.features import Features
from detectors.calibration.fit_combination import fit_combination
from detectors.calibration.fit_h_node import Statements
from detectors.calibration.fit_probe import FittedProbe, fit_probe, probe_files
from detectors.calibration.fit_text_baseline import text_baseline_files, unseen_probabilities
from detectors.calibration.fit_tool_risk import fit_tool_risk, tool_risk_files
from detectors.calibration.fit_tracker import fit_tracker, tracker_scores
from detectors.calibration.fitted import Fitted, Job, Scored, calibration
from detectors.calibration.metrics import Labels, Scores, Tried
from detectors.calibration.probe_candidates import LabelledRows
from detectors.calibration.provenance import data_sources
from detectors.calibration.rows import Row
from detectors.calibration.scoring import combined
from detectors.calibration.seen_rows import seen_digests
from detectors.calibration.sources import DataError
from detectors.combination import Combination, CombinationConfig
from detectors.combination import Params as CombinationParams
from detectors.linear import sigmoid
from detectors.model_config import Calibration
from detectors.probe import Params as ProbeParams
from detectors.probe import ProbeConfig
from detectors.text_baseline import BIAS as TEXT_BIAS
from detectors.text_baseline import IDF, TextBaseline, TextBaselineConfig
from detectors.text_baseline import WEIGHT as TEXT_WEIGHT
from detectors.text_baseline import Params as TextParams
from detectors.tool_call_risk import ToolCallRiskConfig

Index = npt.NDArray[np.int64]

KINDS = ("attention_tracker", "probe", "text_baseline", "combination", "tool_call_risk")


@dataclass(frozen=True)
class _Data:
    rows: Sequence[Row]
    features: Features
    labels: Labels

    def part(self, split: str) -> _Data:
        return self.where(np.flatnonzero([row.split == split for row in self.rows]))

    def read_by(self, kind: str) -> _Data:
        return self.where(np.array(readable(kind, self.rows), np.int64))

    def where(self, index: Index) -> _Data:
        return _Data([self.rows[i] for i in index], self.features.part(index), self.labels[index])

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self.rows]

    @property
    def groups(self) -> list[str]:
        return [row.group for row in self.rows]

    def scored(self, scores: Scores) -> Scored:
        return Scored(scores, self.labels, self.groups, [row.source for row in self.rows], alike=self.groups)


def fit_on_prompts(
    job: Job, rows: Sequence[Row], features: Features, say: Callable[[str], None] = lambda _: None
) -> dict[str, Fitted]:
    """By kind, those of ``job.kinds`` that are fitted to prompts; the same input gives the same result. A kind that the
    rows do not suffice for is left out, and said; alone it raises ``DataError``."""
    return _Prompts(job, rows, features, say).fitted()


class _Prompts:
    """One run. What several kinds need is computed once, when the first of them does."""

    def __init__(self, job: Job, rows: Sequence[Row], features: Features, say: Callable[[str], None]) -> None:
        self.job = job
        self.rows = rows
        self.features = features
        self.say = say
        data = _Data(rows, features, np.array([row.label == "attack" for row in rows], dtype=np.int64))
        self.train, self.validation, self.held_out = (data.part(one) for one in ("train", "validation", "held_out"))
        self.both_labels = np.concatenate([self.train.labels, self.validation.labels])
        self.both_groups = [*self.train.groups, *self.validation.groups]

    def fitted(self) -> dict[str, Fitted]:
        make = {
            "attention_tracker": self._tracker,
            "probe": self._probe,
            "text_baseline": self._text,
            "combination": self._combination,
            "tool_call_risk": self._tool_risk,
        }
        made: dict[str, Fitted] = {}
        for kind in (kind for kind in KINDS if kind in self.job.kinds):
            if not (why := lacking(kind, self.rows)):
                made[kind] = make[kind]()
            elif len(self.job.kinds) == 1:
                raise DataError(f"{kind}: {why}")
            else:
                self.say(f"left out {kind}: {why}")
        return made

    @cached_property
    def text(self) -> Pipeline:
        self.say("fitting the text baseline")
        return fit_baseline(self.train.texts, self.train.labels, self.validation.texts, self.validation.labels)

    @cached_property
    def text_held_out(self) -> Scored:
        return self.held_out.scored(baseline_scores(self.text, self.held_out.texts))

    @cached_property
    def text_detector(self) -> tuple[TextParams, dict[str, bytes], Scores]:
        """What is written, and probabilities of training and validation rows by fits that did not see them."""
        texts = [*self.train.texts, *self.validation.texts]
        unseen = unseen_scores(self.text, texts, self.both_labels, self.both_groups, self.job.seed)
        params, files = text_baseline_files(self.text, unseen, self.both_labels, self.job.config_key)
        return params, files, unseen_probabilities(unseen, self.both_labels)

    @cached_property
    def probe(self) -> FittedProbe:
        self.say("choosing layers for the probe and fitting it")
        seen, checked = (
            LabelledRows(part.features, part.labels, part.groups) for part in (self.train, self.validation)
        )
        return fit_probe(seen, checked, self.job.seed, self.job.pooling)

    @cached_property
    def probe_held_out(self) -> Scores:
        return np.asarray(sigmoid(self.probe.logits(self.held_out.features)))

    def _calibration(self, method: str, choices: dict[str, str], setting: Tried, scores: Scores) -> Calibration:
        held_out, sources = self.held_out.scored(scores), data_sources(self.rows)
        seen = seen_digests(self.rows)
        return calibration(self.job, method, sources, choices, setting, held_out, self.text_held_out, seen)

    def _calibration_on(
        self, kind: str, method: str, choices: dict[str, str], setting: Tried, scores: Scores
    ) -> Calibration:
        """Of a kind that does not read every row."""
        read = [self.rows[i] for i in readable(kind, self.rows)]
        held_out = self.held_out.read_by(kind)
        text = held_out.scored(baseline_scores(self.text, held_out.texts))
        of_these = held_out.scored(scores)
        return calibration(self.job, method, data_sources(read), choices, setting, of_these, text, seen_digests(read))

    def _tracker(self) -> Fitted:
        self.say("choosing heads for the attention tracker")
        train, validation, held_out = (
            part.read_by("attention_tracker") for part in (self.train, self.validation, self.held_out)
        )
        tracker = fit_tracker(train.features, train.labels, validation.features, validation.labels)
        heads = np.array([self.features.heads.index(head) for head in tracker.heads])
        setting = Tried(tracker_scores(validation.features, heads), validation.labels, validation.groups)
        scores = tracker_scores(held_out.features, heads)
        config = AttentionTrackerConfig(
            model_info=self.job.model_info,
            params=TrackerParams(important_heads=tuple((layer - 1, head) for layer, head in tracker.heads)),
            calibration=self._calibration_on(
                "attention_tracker", "heads chosen from labelled rows", tracker.choices, setting, scores
            ),
        )
        return Fitted(config)

    @cached_property
    def probe_files(self) -> tuple[ProbeParams, bytes]:
        """What is written."""
        probe = self.probe
        return probe_files(probe.choice, probe.linear, self.job.config_key, self.features.hidden.shape[-1])

    def _probe(self) -> Fitted:
        params, weights = self.probe_files
        setting = Tried(np.asarray(sigmoid(self.probe.unseen)), self.both_labels, self.both_groups)
        config = ProbeConfig(
            model_info=self.job.model_info,
            params=params,
            calibration=self._calibration("logistic regression", self.probe.choices, setting, self.probe_held_out),
        )
        return Fitted(config, {params.weights: weights})

    def _text(self) -> Fitted:
        params, files, unseen = self.text_detector
        config = TextBaselineConfig(
            model_info=self.job.model_info,
            params=params,
            calibration=self._calibration(
                "TF-IDF and logistic regression",
                {
                    "variant": f"AUROC on validation rows: {variant(self.text)}",
                    "calibration": "Platt scaling on out-of-fold scores",
                },
                Tried(unseen, self.both_labels, self.both_groups),
                self._text_probabilities(),
            ),
        )
        return Fitted(config, files)

    def _text_probabilities(self) -> Scores:
        """Of held-out rows, by the detector as it is written."""
        params, files, _ = self.text_detector
        tensors = load(files[params.weights])
        config = TextBaselineConfig(model_info=self.job.model_info, params=params)
        terms, bias = json.loads(files[params.vocabulary]), float(tensors[TEXT_BIAS][0])
        detector = TextBaseline(config, terms, tensors[IDF], tensors[TEXT_WEIGHT], bias)
        return np.array([detector.score_text(text).value for text in self.held_out.texts], np.float64)

    def _combination(self) -> Fitted:
        """Of what the model computes and what the text says. Fitted to scores of rows that neither input's fit saw."""
        unseen = {"probe": np.asarray(sigmoid(self.probe.unseen)), "text_baseline": self.text_detector[2]}
        self.say("fitting the combination")
        inputs = {
            "probe": ProbeConfig(model_info=self.job.model_info, params=self.probe_files[0]),
            "text_baseline": TextBaselineConfig(model_info=self.job.model_info, params=self.text_detector[0]),
        }
        fitted_to = {kind: config.fingerprint for kind, config in inputs.items()}
        params = fit_combination(unseen, self.both_labels, fitted_to=fitted_to)
        setting = Tried(self._combined(params, unseen), self.both_labels, self.both_groups)
        held_out = {"probe": self.probe_held_out, "text_baseline": self._text_probabilities()}
        weights = ", ".join(f"{kind} {one.weight:.2f}" for kind, one in params.inputs.items())
        config = CombinationConfig(
            model_info=self.job.model_info,
            params=params,
            calibration=self._calibration(
                "logistic regression on logits of probe and text baseline",
                {"weights": f"out-of-fold scores of training and validation rows: {weights}"},
                setting,
                self._combined(params, held_out),
            ),
        )
        return Fitted(config)

    def _combined(self, params: CombinationParams, scores: dict[str, Scores]) -> Scores:
        combination = Combination(CombinationConfig(model_info=self.job.model_info, params=params))
        return combined(combination, scores)

    def _tool_risk(self) -> Fitted:
        """Rows that end with what a tool returned: the next token begins the agent's next step."""
        self.say("fitting the tool-call probe")
        train, validation, held_out = (
            part.read_by("tool_call_risk") for part in (self.train, self.validation, self.held_out)
        )
        fitted = fit_tool_risk(_statements(train), _statements(validation))
        params, weights = tool_risk_files(fitted, self.job.config_key)
        unseen = np.asarray(sigmoid(fitted.logits(_statements(validation).states)))
        setting = Tried(unseen, validation.labels, validation.groups)
        scores = np.asarray(sigmoid(fitted.logits(_statements(held_out).states)))
        config = ToolCallRiskConfig(
            model_info=self.job.model_info,
            params=params,
            calibration=calibration(
                self.job,
                "principal components and logistic regression on the state before an agent's step",
                data_sources([*train.rows, *validation.rows, *held_out.rows]),
                fitted.choices,
                setting,
                held_out.scored(scores),
                held_out.scored(baseline_scores(self.text, held_out.texts)),
                # The text baseline beside it saw more; it is not what is calibrated.
                seen_digests([*train.rows, *validation.rows]),
            ),
        )
        return Fitted(config, {params.weights: weights})


def _statements(part: _Data) -> Statements:
    states = {layer: part.features.hidden[:, i].astype(np.float64) for i, layer in enumerate(part.features.layers)}
    return Statements(states, part.labels, part.groups)
