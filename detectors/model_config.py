"""Files in ``model_configs``: what is known about one model for one detector, and how each figure was measured.

Owns the types that all detectors' files share and loading them. What a detector needs beyond that is in its own file.
Nothing here computes a score.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from guard.mistakes import first_mistake

log = logging.getLogger("guard.detectors")


class ModelConfigError(ValueError):
    """A model_configs file that cannot be used; the message names the file, the field and the remedy."""


class Section(BaseModel):
    """Base of everything in these files: unknown keys are refused, so that a misspelt one is not silently unread."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelInfo(Section):
    """Which model the file is for. Keys as in MIA's published files; read by people."""

    provider: str = ""
    name: str
    model_id: str = ""
    note: str = ""


class Interval(Section):
    """A 95 % confidence interval."""

    low: float
    high: float


class Quality(Section):
    """What was measured on rows that nothing was fitted to or chosen on. Intervals: bootstrap over groups of rows."""

    benign: Annotated[int, Field(ge=1)]
    """Benign rows."""
    attack: Annotated[int, Field(ge=1)]
    """Attack rows."""
    auroc: float
    auroc_interval: Interval
    auprc: float
    tpr_at_fpr_1pct: float
    """Share of attacks caught by the threshold that these same rows' benign scores allow at 1 %."""
    tpr_at_fpr_1pct_interval: Interval
    auroc_by_source: dict[str, float] = {}
    """The same per data set, where it has both labels."""


class Threshold(Section):
    """One operating point: a score at or above ``value`` is a hit. Set on validation rows, then tried on held-out ones.

    Rows that are nearly the same are a group. Shares (``validation_fpr`` and the like) and their intervals, exact ones
    (Clopper-Pearson), are of groups where these are known: each counts as one, and hits of a part of it as that part.
    So a share may differ from counted rows divided by all.
    """

    value: float
    validation_benign: int
    validation_benign_groups: int | None = None
    """How many of these rows are different; None where each is taken for different, as in a ledger, which has no
    texts, and in files of versions that did not count it."""
    validation_false_positives: int
    validation_fpr: float | None = None
    """None in files of versions that did not write it; so are the other shares."""
    validation_fpr_interval: Interval | None = None
    """None in files of versions that did not write it."""
    held_out_benign: int
    held_out_benign_groups: int | None = None
    """As of validation rows."""
    held_out_false_positives: int
    held_out_fpr: float | None = None
    held_out_fpr_interval: Interval
    held_out_attack: int
    held_out_true_positives: int
    held_out_tpr: float | None = None
    """None where there are no attacks, as in a ledger."""
    held_out_tpr_interval: Interval | None = None
    """None where there are no attacks, as in a ledger, and in files of versions that did not write it."""
    scores_of: str = ""
    """Fingerprint of the file that gave the scores, where ``guard calibrate threshold`` set this from a ledger; empty
    where the calibration did, and in files of versions that did not write it."""


class Reached(Section):
    """How many of some rows of one label reach each named threshold."""

    rows: int
    different: int
    """Rows of which no two are nearly the same."""
    hits: dict[str, int]
    """Threshold's name -> rows that reach it."""
    intervals: dict[str, Interval]
    """Threshold's name -> of the share, exact (Clopper-Pearson) over different rows."""


class DataSource(Section):
    """One data set: which installed distribution it was read from, and how many of its rows went where."""

    name: str
    version: str
    licence: str
    sha256: str
    """Of the rows as used, in order: same hash, same rows."""
    rows: dict[str, dict[str, int]]
    """Split -> label -> rows."""


class Calibration(Section):
    """How a file came about; enough to repeat it with ``guard calibrate``."""

    method: str
    date: str
    command: str
    seed: int
    versions: dict[str, str]
    """Distribution -> version of what computed the figures."""
    model_sha256: str
    """Of the model's weights file."""
    data: tuple[DataSource, ...]
    seen_rows: str = ""
    """Digests of the texts that were fitted to, chosen on or set thresholds, in base64, so that an evaluation can tell
    when it measures on them; of statements made from facts, of question with answer or of reference with claim.
    Empty in files of versions that did not write it."""
    choices: dict[str, str]
    """What was chosen -> on which rows and how it fared."""
    quality: Quality
    text_baseline: Quality
    """TF-IDF with logistic regression on the same rows, for comparison: what reading the text alone gives."""
    thresholds: dict[str, Threshold]
    parts: dict[str, Reached] = {}
    """What rows are -> how many of them reach the thresholds; of probes with windows, which are measured on long
    documents by kind, and on attacks in documents by their place."""


class Published(Section):
    """Where figures come from that nobody has measured here."""

    by: str
    """Who published them, and in what."""
    licence: str
    """SPDX identifier."""
    remeasure: str
    """The command that measures the model and replaces this file."""


class ModelConfig(Section):
    """What the files of all detectors have in common."""

    model_info: ModelInfo
    verified: bool = True
    """False for figures that were taken from elsewhere, whose quality nobody here knows. Loading such a file warns."""
    published: Published | None = None
    """Whose figures these are, where they are not ours."""
    calibration: Calibration | None = None
    """None for figures taken from elsewhere and not verified here; such a file has no named thresholds."""

    @model_validator(mode="after")
    def _unverified_figures_are_somebodys(self) -> Self:
        if not self.verified and (self.published is None or self.calibration is not None):
            raise ValueError("figures that are not verified have published, and no calibration")
        return self

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits of what a score is computed from, its weights' hash among it, and not the thresholds:
        scores that two files give compare where these are the same."""
        told = {"model_info", "verified", "published", "calibration"}
        content = self.model_dump(mode="json", exclude=told, exclude_defaults=True)
        params = content.get("params", {})
        for name in [name for name in params if f"{name}_sha256" in params]:
            del params[name]  # a file is what it holds, whatever it is called
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def threshold_values(self) -> dict[str, float]:
        if self.calibration is None:
            return {}
        return {name: threshold.value for name, threshold in self.calibration.thresholds.items()}


Config = TypeVar("Config", bound=ModelConfig)


def fingerprint_of(detector: object) -> str | None:
    """Of the file that a detector was built from; None of one without such a file."""
    config = getattr(detector, "config", None)
    return config.fingerprint if isinstance(config, ModelConfig) else None


def load_model_config(path: Path, schema: type[Config]) -> Config:
    """Read and check one file. Raises ``ModelConfigError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelConfigError(
            f"{path}: {error.strerror}; `guard calibrate --model MODEL` measures a model and writes this file"
        ) from error
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"{path}: is not UTF-8 (byte {error.start})") from None
    try:
        config = schema.model_validate_json(text)
    except ValidationError as error:
        location, what = first_mistake(error)
        raise ModelConfigError(f"{path}: {'.'.join(map(str, location)) or 'the file'}: {what}") from None
    if not config.verified and config.published is not None:
        log.warning(
            "%s: figures of %s, not verified here, and without thresholds by name; to measure them: %s",
            path,
            config.published.by,
            config.published.remeasure,
        )
    return config
