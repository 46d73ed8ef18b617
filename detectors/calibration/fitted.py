"""What every kind of calibration has in common: the job, what comes of it, and the record of how it came about.

Owns the shape of a fitted detector before it is files, and writing those.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from detectors.calibration.metrics import Labels, Scores, Tried, quality, thresholds
from detectors.calibration.provenance import versions
from detectors.model_config import Calibration, DataSource, ModelConfig, ModelInfo, Quality, Section, Threshold
from guard.model_weights import weights_sha256
from guard.writable import write_result

Pooling = Literal["last_token", "mean", "max"]
PoolingChoice = Literal["last_token", "mean", "max", "best"]
"""``best``: whichever of them is."""
ONE_POOLING: tuple[Pooling, ...] = get_args(Pooling)


@dataclass(frozen=True)
class Job:
    """What to calibrate. ``config_key`` is the stem of the files written; ``command`` repeats this run."""

    model: Path
    config_key: str
    model_id: str
    kinds: tuple[str, ...]
    seed: int
    command: str
    pooling: PoolingChoice = "last_token"
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
    setting: Tried | Mapping[str, Threshold],
    held_out: Scored,
    text_baseline: Scored,
    seen_rows: str,
) -> Calibration:
    """The record. setting: scores of rows that thresholds are set on, each by a fit that did not see it, with labels;
    or the thresholds, where they are set otherwise.
    held_out, text_baseline: of the same held-out rows. seen_rows: as in
    ``Calibration``, of the same rows as ``data``."""
    return Calibration(
        method=method,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=job.command,
        seed=job.seed,
        versions=versions(),
        model_sha256=weights_sha256(job.model),
        data=data,
        seen_rows=seen_rows,
        choices=choices,
        quality=held_out.quality(job.seed),
        text_baseline=text_baseline.quality(job.seed),
        thresholds=thresholds(setting, Tried(held_out.scores, held_out.labels, held_out.alike))
        if isinstance(setting, Tried)
        else dict(setting),
    )


def write(fitted: Mapping[str, Fitted], job: Job, out: Path) -> list[Path]:
    """Write ``out/<kind>/<config_key>.json`` and what belongs beside it; returns the paths.

    The JSON comes last and names the others with their hashes. A file beside that is there with other content stays
    until then, so that a run which is killed at any time, or that a full disk stops, leaves a detector that loads, the
    old one or the new one. Raises ``NotWritableError``.
    """
    written = []
    for kind, one in fitted.items():
        folder = out / kind
        names = {name: _free_name(folder, name, content) for name, content in one.files.items()}
        for name, content in one.files.items():
            written.append(folder / names[name])
            write_result(written[-1], content)
        config = folder / f"{job.config_key}.json"
        before = _files_of(config)
        write_result(config, (_renamed(one.config, names).model_dump_json(indent=2) + "\n").encode())
        written.append(config)
        for name in before - set(names.values()):
            (folder / name).unlink(missing_ok=True)
    return written


def _free_name(folder: Path, name: str, content: bytes) -> str:
    """``name``, or one with the content's hash where a file with another content has it."""
    path = folder / name
    if not path.exists() or path.read_bytes() == content:
        return name
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:8]}{dot}{suffix}"


def _renamed(config: ModelConfig, names: Mapping[str, str]) -> ModelConfig:
    """With the names that the files have got."""
    params: Section | None = getattr(config, "params", None)
    if params is None:
        return config
    given = {field: names[value] for field, value in params if isinstance(value, str) and value in names}
    return config.model_copy(update={"params": params.model_copy(update=given)})


def _files_of(config: Path) -> set[str]:
    """Names of files in its folder that a file of before gives its hashes of; none where it cannot be read."""
    try:
        params = json.loads(config.read_bytes())["params"]
        named = {params[field] for field in params if f"{field}_sha256" in params}
    except (OSError, ValueError, LookupError, TypeError):
        return set()
    return {name for name in named if isinstance(name, str) and Path(name).name == name}
