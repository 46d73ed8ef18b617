"""What every kind of calibration has in common: the job, what comes of it, and the record of how it came about.

Owns the shape of a fitted detector before it is files, and writing those.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from detectors.calibration.metrics import Labels, Scores, Tried, quality, thresholds
from detectors.calibration.provenance import versions
from detectors.model_config import Calibration, DataSource, ModelConfig, ModelInfo, Quality
from guard.model_weights import weights_sha256

Pooling = Literal["last_token", "mean"]


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

    @property
    def model_info(self) -> ModelInfo:
        note = "measured by guard calibrate"
        return ModelInfo(provider="attn-hf", name=self.config_key, model_id=self.model_id, note=note)


@dataclass(frozen=True)
class Fitted:
    """One detector: what its JSON says, and the files beside it by name."""

    config: ModelConfig
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """Scores with what they are measured by, each ``[rows]``. groups: rows of one idea, which the bootstrap draws
    together; sources: the data set of each row; alike: rows that count as one in a share of rows, None where each is
    different from all others."""

    scores: Scores
    labels: Labels
    groups: Sequence[str]
    sources: Sequence[str]
    alike: Sequence[str] | None = None

    def quality(self, seed: int) -> Quality:
        return quality(self.scores, self.labels, self.groups, self.sources, seed)


def calibration(
    job: Job,
    method: str,
    data: tuple[DataSource, ...],
    choices: dict[str, str],
    setting: Tried,
    held_out: Scored,
    text_baseline: Scored,
) -> Calibration:
    """The record. setting: scores of rows that thresholds are set on, each by a fit that did not see it, with labels;
    held_out, text_baseline: of the same held-out rows."""
    return Calibration(
        method=method,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=job.command,
        seed=job.seed,
        versions=versions(),
        model_sha256=weights_sha256(job.model),
        data=data,
        choices=choices,
        quality=held_out.quality(job.seed),
        text_baseline=text_baseline.quality(job.seed),
        thresholds=thresholds(setting, Tried(held_out.scores, held_out.labels, held_out.alike)),
    )


def write(fitted: Mapping[str, Fitted], job: Job, out: Path) -> list[Path]:
    """Write ``out/<kind>/<config_key>.json`` and what belongs beside it; returns the paths. The JSON comes last:
    it names the hashes of the others."""
    written = []
    for kind, one in fitted.items():
        folder = out / kind
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in one.files.items():
            written.append(folder / name)
            written[-1].write_bytes(content)
        written.append(folder / f"{job.config_key}.json")
        written[-1].write_text(one.config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return written
