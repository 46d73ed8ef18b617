"""The probe: a logistic regression on what the model's residual stream holds when it has read the prompt.

Owns one formula: ``sigmoid(weight . x + bias)``, x being the last prompt token's residual stream after one block, or
after several, concatenated. Standardisation and calibration are folded into weight and bias when they are fitted. The
value is a probability, calibrated for data that is half attacks. Weights lie in a safetensors file beside the JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load

from detectors.base import CapturePlan, Score
from detectors.model_config import ModelConfig, ModelConfigError, Section, load_model_config
from guard.mia.results import FloatArray, HiddenReadout, Readout
from guard.mia.spec import HiddenCapture, Layer

WEIGHT, BIAS = "weight", "bias"


class Params(Section):
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=64)]
    """Layers read, in the order of the weights; numbers as in transformers' ``hidden_states``: 0 the embedding."""
    hidden_size: Annotated[int, Field(ge=1)]
    weights: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+\.safetensors$")]
    """Name of a file in this file's folder: ``weight`` [layers x hidden_size] and ``bias`` [1], float32."""
    weights_sha256: str
    """Of that file, so that the thresholds here are never used with other weights."""


class ProbeConfig(ModelConfig):
    params: Params


def sigmoid(logits: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The logistic function, without overflow at either end."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=np.float64))))


class Probe:
    kind = "probe"

    def __init__(self, config: ProbeConfig, weight: FloatArray, bias: float) -> None:
        self.config = config
        self.thresholds: Mapping[str, float] = config.threshold_values()
        self.weight = weight.astype(np.float64)
        self.bias = bias

    @classmethod
    def load(cls, path: Path) -> Probe:
        config = load_model_config(path, ProbeConfig)
        weight, bias = _load_weights(path.parent / config.params.weights, config.params)
        return cls(config, weight, bias)

    def plan(self) -> CapturePlan:
        return CapturePlan(hidden={_capture(layer): HiddenCapture(layer=layer) for layer in self.config.params.layers})

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        states = []
        for layer in self.config.params.layers:
            readout = readouts.get(_capture(layer))
            if not isinstance(readout, HiddenReadout):
                return Score("unavailable", reason=f"no hidden state of layer {layer} came back")
            if readout.status != "complete" or readout.values is None:
                return Score("unavailable", reason=readout.reason or f"hidden state of layer {layer} {readout.status}")
            if readout.values.shape != (self.config.params.hidden_size,):
                return Score(
                    "unavailable",
                    reason=f"hidden state of layer {layer} has shape {list(readout.values.shape)}, "
                    f"the probe was fitted on [{self.config.params.hidden_size}]: another model?",
                )
            states.append(readout.values)
        logit = np.concatenate(states).astype(np.float64) @ self.weight + self.bias
        if not np.isfinite(logit):
            return Score("unavailable", reason="hidden state is not finite")
        return Score("scored", float(sigmoid(logit)))


def _capture(layer: int) -> str:
    return f"layer{layer}"


def _load_weights(path: Path, params: Params) -> tuple[FloatArray, float]:
    try:
        raw = path.read_bytes()
        tensors = load(raw)
    except (OSError, SafetensorError) as error:
        raise ModelConfigError(f"{path}: cannot be read as safetensors: {error}") from error
    if (found := hashlib.sha256(raw).hexdigest()) != params.weights_sha256:
        raise ModelConfigError(
            f"{path}: SHA-256 is {found}, the JSON beside it was written for {params.weights_sha256}; "
            "take both from the same calibration"
        )
    shape = (len(params.layers) * params.hidden_size,)
    weight, bias = tensors.get(WEIGHT), tensors.get(BIAS)
    if weight is None or bias is None or weight.shape != shape or bias.shape != (1,):
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise ModelConfigError(f"{path}: must hold {WEIGHT!r} {list(shape)} and {BIAS!r} [1], not {shapes}")
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ModelConfigError(f"{path}: weights are not finite")
    return weight, float(bias[0])
