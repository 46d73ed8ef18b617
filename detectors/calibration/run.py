"""Calibration of detectors from start to end: rows, one pass of the model, fits, thresholds, held-out quality, files.

Owns the order of the steps, and that held-out rows are looked at once, at the end.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from detectors.attention_tracker import AttentionTrackerConfig
from detectors.attention_tracker import Params as TrackerParams
from detectors.calibration.baseline import baseline_scores, fit_baseline
from detectors.calibration.features import Features
from detectors.calibration.fit_probe import LabelledRows, Pooling, fit_probe
from detectors.calibration.fit_tracker import fit_tracker, tracker_scores
from detectors.calibration.metrics import Labels, Scores, quality, thresholds
from detectors.calibration.provenance import data_sources, versions, weights_sha256
from detectors.calibration.rows import Row
from detectors.model_config import Calibration, ModelConfig, ModelInfo, Quality
from detectors.probe import BIAS, WEIGHT, ProbeConfig, sigmoid
from detectors.probe import Params as ProbeParams


@dataclass(frozen=True)
class Job:
    """What to calibrate. ``config_key`` is the stem of the files written; ``command`` repeats this run."""

    model: Path
    config_key: str
    model_id: str
    kinds: tuple[str, ...]
    seed: int
    command: str
    pooling: Pooling = "last_token"
    """At which tokens the probe reads."""


@dataclass(frozen=True)
class Result:
    """A file's content by detector kind, and the probe's weights file."""

    configs: dict[str, ModelConfig]
    weights: bytes | None


@dataclass(frozen=True)
class _Data:
    rows: Sequence[Row]
    features: Features
    labels: Labels

    def part(self, split: str) -> _Data:
        index = np.flatnonzero([row.split == split for row in self.rows])
        return _Data([self.rows[i] for i in index], self.features.part(index), self.labels[index])

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self.rows]

    @property
    def groups(self) -> list[str]:
        return [row.group for row in self.rows]


def fit_detectors(
    job: Job, rows: Sequence[Row], features: Features, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Everything after the model's pass; the same input gives the same result."""
    data = _Data(rows, features, np.array([row.label == "attack" for row in rows], dtype=np.int64))
    train, validation, held_out = (data.part(split) for split in ("train", "validation", "held_out"))
    say("fitting the text baseline")
    model = fit_baseline(train.texts, train.labels, validation.texts, validation.labels)
    baseline = _quality(baseline_scores(model, held_out.texts), held_out, job)
    configs: dict[str, ModelConfig] = {}
    weights = None
    if "attention_tracker" in job.kinds:
        say("choosing heads for the attention tracker")
        tracker = fit_tracker(train.features, train.labels, validation.features, validation.labels)
        heads = np.array([features.heads.index(head) for head in tracker.heads])
        setting = (tracker_scores(validation.features, heads), validation.labels)
        scores = tracker_scores(held_out.features, heads)
        configs["attention_tracker"] = AttentionTrackerConfig(
            model_info=_model_info(job),
            params=TrackerParams(important_heads=tuple((layer - 1, head) for layer, head in tracker.heads)),
            calibration=_calibration(
                job, "heads chosen from labelled rows", rows, tracker.choices, baseline, setting, scores, held_out
            ),
        )
    if "probe" in job.kinds:
        say("choosing layers for the probe and fitting it")
        seen, checked = (LabelledRows(part.features, part.labels, part.groups) for part in (train, validation))
        probe = fit_probe(seen, checked, job.seed, job.pooling)
        setting = (np.asarray(sigmoid(probe.unseen)), np.concatenate([train.labels, validation.labels]))
        scores = np.asarray(sigmoid(probe.logits(held_out.features)))
        weights = save(
            {
                WEIGHT: probe.linear.weight.astype(np.float32),
                BIAS: np.array([probe.linear.bias], dtype=np.float32),
            },
            metadata={"model": job.config_key},  # one entry: the format keeps several in no fixed order
        )
        configs["probe"] = ProbeConfig(
            model_info=_model_info(job),
            params=ProbeParams.model_validate(
                {
                    "layers": probe.layers,
                    "hidden_size": features.hidden.shape[-1],
                    "weights": f"{job.config_key}.safetensors",
                    "weights_sha256": hashlib.sha256(weights).hexdigest(),
                    **({"pooling": probe.choice.pooling} if probe.choice.pooling != "last_token" else {}),
                }
            ),
            calibration=_calibration(
                job, "logistic regression", rows, probe.choices, baseline, setting, scores, held_out
            ),
        )
    return Result(configs, weights)


def write(result: Result, job: Job, out: Path) -> list[Path]:
    """Write ``out/<kind>/<config_key>.json``, and the probe's weights beside its file; returns the paths."""
    written = []
    for kind, config in result.configs.items():
        folder = out / kind
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "probe" and result.weights is not None:
            written.append(folder / f"{job.config_key}.safetensors")
            written[-1].write_bytes(result.weights)
        written.append(folder / f"{job.config_key}.json")
        written[-1].write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return written


def _model_info(job: Job) -> ModelInfo:
    return ModelInfo(provider="attn-hf", name=job.config_key, model_id=job.model_id, note="measured by guard calibrate")


def _calibration(
    job: Job,
    method: str,
    rows: Sequence[Row],
    choices: dict[str, str],
    baseline: Quality,
    setting: tuple[Scores, Labels],
    scores: Scores,
    held_out: _Data,
) -> Calibration:
    return Calibration(
        method=method,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=job.command,
        seed=job.seed,
        versions=versions(),
        model_sha256=weights_sha256(job.model),
        data=data_sources(rows),
        choices=choices,
        quality=_quality(scores, held_out, job),
        text_baseline=baseline,
        thresholds=thresholds(setting, (scores, held_out.labels)),
    )


def _quality(scores: Scores, part: _Data, job: Job) -> Quality:
    return quality(scores, part.labels, part.groups, [row.source for row in part.rows], job.seed)
