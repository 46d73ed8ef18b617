"""The combination: one probability from the scores of several detectors.

Owns one formula: ``sigmoid(bias + sum over inputs of weight . t(score))``, t being the logit of a score that is a
probability, or the score itself. A score that is missing makes the result unavailable, unless the file says what an
input is then taken as; the result names those it did so for. Plain numbers in the JSON, no weights file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from detectors.base import Score
from detectors.linear import sigmoid
from detectors.model_config import ModelConfig, Section, load_model_config

CLIP = 1e-6
"""Scores that are taken the logit of are kept this far from 0 and 1."""

Kind = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]


class Input(Section):
    weight: float
    transform: Literal["logit", "identity"] = "logit"
    """``logit``: the score is a probability. ``identity``: as it is."""
    when_missing: float | None = None
    """The score that is taken where there is none; None: without it there is no combination."""
    fitted_to: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")] | None = None
    """Fingerprint of the detector whose scores the weight was fitted to, as a ledger's ``measured`` has it behind
    ``+``; None in files of versions that did not write it."""


class Params(Section):
    inputs: Annotated[dict[Kind, Input], Field(min_length=1, max_length=8)]
    """By the kind of the detector. A policy says which of its detectors these are."""
    bias: float


class CombinationConfig(ModelConfig):
    params: Params


def transformed(value: float, transform: Literal["logit", "identity"]) -> float:
    """t of the formula."""
    if transform == "identity":
        return value
    kept = min(1.0 - CLIP, max(CLIP, value))
    return float(np.log(kept) - np.log1p(-kept))


class Combination:
    kind = "combination"

    def __init__(self, config: CombinationConfig) -> None:
        self.config = config
        self.thresholds: Mapping[str, float] = config.threshold_values()
        self.inputs = tuple(config.params.inputs)

    @classmethod
    def load(cls, path: Path) -> Combination:
        return cls(load_model_config(path, CombinationConfig))

    def score_from(self, scores: Mapping[str, Score]) -> Score:
        logit = self.config.params.bias
        lost: list[tuple[str, Score | None]] = []
        taken = []
        for kind, one in self.config.params.inputs.items():
            score = scores.get(kind)
            value = score.value if score is not None and score.status == "scored" else None
            if value is None and one.when_missing is not None:
                value = one.when_missing
                taken.append(f"{kind} has no score and is taken as {value:g}")
            if value is None:
                lost.append((kind, score))
            else:
                logit += one.weight * transformed(value, one.transform)
        if lost:
            reasons = [f"{kind}: {score.reason if score else 'it was not measured'}" for kind, score in lost]
            late = all(score is not None and score.timed_out for _, score in lost)
            return Score("unavailable", reason="; ".join(reasons), timed_out=late)
        return Score("scored", float(sigmoid(logit)), reason="; ".join(taken))
