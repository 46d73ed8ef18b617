"""The probe: a logistic regression on what the model's residual stream holds of the prompt.

Owns one formula: ``sigmoid(pool(weight . x + bias))``, x being a token's residual stream after one block, or after
several, concatenated. The pool is the last prompt token, or the mean or the maximum over the tokens of a span; the mean
of the logits is the logit of the mean state. Standardisation and calibration are folded into weight and bias when they
are fitted. The value is a probability, calibrated for data that is half attacks. Weights lie in a safetensors file
beside the JSON. ``windows``: the data of a long prompt is read once more, window by window, and the highest value
counts (``detectors.windows``).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from detectors.base import CapturePlan, Score, TokenValues
from detectors.linear import BIAS, WEIGHT, LinearParams, LinearReader, load_linear, sigmoid
from detectors.model_config import ModelConfig, load_model_config
from detectors.windows import DATA, TEXTS, Windows
from guard.mia.results import FloatArray, Readout
from guard.mia.spec import Positions, SpanPositions, TokenRanges

__all__ = ["BIAS", "DATA", "DEFAULT_SPANS", "WEIGHT", "Params", "Probe", "ProbeConfig", "sigmoid"]

DEFAULT_SPANS = {DATA: TEXTS[DATA]}
"""What pools over: what arrives from outside."""


class Params(LinearParams):
    pooling: Literal["last_token", "mean", "max"] = "last_token"
    """Which tokens count: the prompt's last; all of the span ``data``, as their mean; or the one of them that is
    likeliest what the probe looks for. The last two have the whole prompt computed, prefix cache or not."""
    windows: Windows | None = None
    """Read a long prompt's data once more, window by window."""


class ProbeConfig(ModelConfig):
    params: Params


class Probe:
    kind = "probe"
    looks_back = False

    def __init__(self, config: ProbeConfig, weight: FloatArray, bias: float) -> None:
        """weight: ``[layers x hidden_size]``."""
        params = config.params
        self.config = config
        self.thresholds: Mapping[str, float] = config.threshold_values()
        self.windows = params.windows
        self.weight, self.bias = np.asarray(weight, np.float64), bias
        self.pooled = params.pooling != "last_token"
        positions: Positions = SpanPositions(span=DATA) if self.pooled else "last_prompt"
        self.reader = LinearReader(
            params.layers,
            np.asarray(weight, np.float32).reshape(1, len(params.layers), params.hidden_size),
            np.array([bias], np.float32),
            positions,
            average=params.pooling == "mean",
        )

    @classmethod
    def load(cls, path: Path) -> Probe:
        config = load_model_config(path, ProbeConfig)
        weight, bias = load_linear(path.parent, config.params)
        return cls(config, weight.reshape(-1), float(bias[0]))

    def plan(self) -> CapturePlan:
        return self.reader.plan(DEFAULT_SPANS if self.pooled else None)

    def computed(self, *, in_engine: bool) -> Probe:
        other = copy(self)
        # Of a mean one state for the whole span leaves the engine; its logits would be as many as the span has tokens.
        other.reader = replace(self.reader, in_engine=in_engine and not self.reader.average)
        return other

    def token_plan(self, tokens: TokenRanges) -> CapturePlan:
        return self.reader.at(tokens).plan()

    def token_values(self, readouts: Mapping[str, Readout]) -> TokenValues | Score:
        """The probability at each token. It was fitted where the detector reads; elsewhere it is a hint."""
        return self.reader.probabilities(readouts)

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        read = self.reader.read(readouts)
        if isinstance(read, Score):
            return read
        logits = read.logits[:, 0]
        if not len(logits):
            return Score("unavailable", reason="no token was read")
        return Score("scored", float(sigmoid(logits.mean() if self.config.params.pooling == "mean" else logits.max())))
