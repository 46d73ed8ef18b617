"""H-Node: does the state in which the model makes a statement look like those in which it made up others?

Owns the formula of MIA's ``hnode_hallucination`` (after Yocam, Vaidyan and Wang, arXiv 2603.26045). With x a token's
residual stream after block ``best_layer``: the probability is ``sigmoid(((x - mean) / scale) . weight + bias)``, the
excess is the mean over the H-Nodes, the dimensions that say most, of ``max(0, x_j - baseline_j)``. The excess is
reported and decides nothing.

It reads the prompt's last token, where the statement is in the prompt, as MIA does; or each generated token, and what
it makes of them is one number: of the last one, their mean, or their maximum, which can only grow as an answer does.
Weights are our safetensors with a JSON beside them, or MIA's ``probe.npz`` with ``probe.json``. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from detectors.base import CapturePlan, Score, TokenValues
from detectors.linear import LinearReader, WeightsFile, check_shapes, load_tensors, sigmoid
from detectors.model_config import ModelConfig, ModelConfigError, ModelInfo, Section, load_model_config
from guard.mia.results import FloatArray, Readout
from guard.mia.spec import Layer, TokenRanges
from guard.mistakes import first_mistake

WEIGHT, BIAS, MEAN, SCALE = "weight", "bias", "mean", "scale"
INDICES, BASELINES = "node_indices", "node_baselines"

MAX_NODES = 256
"""More would be no selection; and with the engine's help each costs an output of its own."""

MIA_ARRAYS = {
    WEIGHT: "weights",
    BIAS: "bias",
    MEAN: "scaler_mean",
    SCALE: "scaler_scale",
    INDICES: "h_node_indices",
    BASELINES: "h_node_baselines",
}
"""Our names -> those in MIA's ``probe.npz``."""

EXCESS = "excess"


class Params(Section):
    layer: Layer
    """``best_layer``: number as in transformers' ``hidden_states``, which MIA's is too."""
    hidden_size: Annotated[int, Field(ge=1)]
    nodes: Annotated[int, Field(ge=0, le=MAX_NODES)]
    """How many H-Nodes there are; without any there is no excess."""
    read: Literal["answer", "prompt"] = "answer"
    """``answer``: each generated token. ``prompt``: the last prompt token."""
    pooling: Literal["last_token", "mean", "max"] = "max"
    """Of the tokens of an answer."""
    weights: WeightsFile
    """Name of a file in this file's folder: ``weight``, ``mean``, ``scale`` [hidden_size], ``bias`` [1] float32,
    ``node_indices`` [nodes] int64, ``node_baselines`` [nodes] float32."""
    weights_sha256: str
    """Of that file."""


class HNodeConfig(ModelConfig):
    params: Params


class MiaProbeInfo(BaseModel):
    """MIA's ``probe.json``, as far as it says anything to us; the rest is kept by nobody."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_name: str = ""


@dataclass(frozen=True)
class HNodeWeights:
    """weight, mean, scale: ``[hidden_size]``; indices: ``[nodes]`` int64; baselines: ``[nodes]``; all on raw states."""

    weight: FloatArray
    bias: float
    mean: FloatArray
    scale: FloatArray
    indices: np.ndarray[Any, np.dtype[np.int64]]
    baselines: FloatArray

    def outputs(self) -> tuple[FloatArray, FloatArray]:
        """The formula as one linear map of x: first the logit, then ``x_j - baseline_j`` of each node. Weight
        ``[1 + nodes, hidden_size]``, bias ``[1 + nodes]``."""
        folded = self.weight.astype(np.float64) / self.scale
        nodes = np.zeros((len(self.indices), len(self.weight)))
        nodes[np.arange(len(self.indices)), self.indices] = 1.0
        bias = np.concatenate([[self.bias - float(folded @ self.mean)], -self.baselines])
        return np.vstack([folded, nodes]).astype(np.float32), bias.astype(np.float32)


class HNode:
    kind = "h_node"
    looks_back = False

    def __init__(self, config: HNodeConfig, weights: HNodeWeights) -> None:
        self.config = config
        self.thresholds: Mapping[str, float] = config.threshold_values()
        weight, bias = weights.outputs()
        params = config.params
        self.reader = LinearReader(
            (params.layer,),
            weight[:, None],
            bias,
            "generated" if params.read == "answer" else "last_prompt",
        )

    @classmethod
    def load(cls, path: Path) -> HNode:
        config = load_model_config(path, HNodeConfig)
        params, file = config.params, path.parent / config.params.weights
        tensors = load_tensors(file, params.weights_sha256)
        size, nodes = (params.hidden_size,), (params.nodes,)
        check_shapes(
            file, tensors, {WEIGHT: size, BIAS: (1,), MEAN: size, SCALE: size, INDICES: nodes, BASELINES: nodes}
        )
        return cls(config, _weights(file, tensors))

    def plan(self) -> CapturePlan:
        return self.reader.plan()

    def computed(self, *, in_engine: bool) -> HNode:
        other = copy(self)
        other.reader = replace(self.reader, in_engine=in_engine)
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
        if not len(read.logits):
            return Score("unavailable", reason="no token of the answer was read: it has one token or none")
        logits, excess = read.logits[:, 0], np.maximum(read.logits[:, 1:], 0.0)
        probabilities = sigmoid(logits)
        pooling = self.config.params.pooling
        at = int(np.argmax(probabilities)) if pooling == "max" else -1
        value = float(probabilities.mean() if pooling == "mean" else probabilities[at])
        if not excess.shape[1]:
            return Score("scored", value)
        of_node = float(excess.mean() if pooling == "mean" else excess[at].mean())
        return Score("scored", value, details=((EXCESS, of_node),))


def read_mia_probe(npz: Path, *, read: Literal["answer", "prompt"] = "prompt") -> HNode:
    """MIA's ``probe.npz``, with the ``probe.json`` beside it where there is one, as a detector. Its thresholds are
    nobody's yet; MIA's own is 0.5. Raises ``ModelConfigError``."""
    arrays = _mia_arrays(npz)
    info = _mia_info(npz.with_suffix(".json"))
    weights = _weights(npz, arrays)
    size = len(weights.weight)
    check_shapes(npz, arrays, {MEAN: (size,), SCALE: (size,), BASELINES: weights.indices.shape})
    try:
        params = Params(
            layer=_whole(npz, arrays, "best_layer"),
            hidden_size=size,
            nodes=len(weights.indices),
            read=read,
            pooling="last_token",
            weights="probe.safetensors",
            weights_sha256=hashlib.sha256(npz.read_bytes()).hexdigest(),
        )
    except ValidationError as error:
        location, what = first_mistake(error)
        names = {"layer": "best_layer", "nodes": "h_node_indices", "hidden_size": "weights"}
        raise ModelConfigError(f"{npz}: {names.get(str(location[0]), location[0])}: {what}") from None
    if size != (told := _whole(npz, arrays, "hidden_size")):
        raise ModelConfigError(f"{npz}: hidden_size is {told}, and the weights are for {size}")
    info_of_model = ModelInfo(provider="MIA", name=info.model_name or npz.parent.name)
    return HNode(HNodeConfig(model_info=info_of_model, params=params), weights)


def _mia_arrays(npz: Path) -> dict[str, FloatArray]:
    wanted = {**MIA_ARRAYS, "best_layer": "best_layer", "hidden_size": "hidden_size"}
    try:
        with np.load(npz, allow_pickle=False) as archive:
            arrays = {ours: np.asarray(archive[theirs]) for ours, theirs in wanted.items()}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ModelConfigError(f"{npz}: cannot be read as MIA's probe: {error}") from error
    arrays[WEIGHT] = arrays[WEIGHT].reshape(-1)
    arrays[BIAS] = arrays[BIAS].reshape(-1)
    if not all(array.dtype.kind in "iuf" and np.isfinite(array).all() for array in arrays.values()):
        raise ModelConfigError(f"{npz}: holds something else than finite numbers")
    return arrays


def _whole(npz: Path, arrays: Mapping[str, FloatArray], name: str) -> int:
    """Raises ``ModelConfigError`` for what is not one whole number."""
    values = arrays[name].reshape(-1)
    if len(values) != 1 or values[0] != int(values[0].real):
        raise ModelConfigError(f"{npz}: {name}: must be one whole number")
    return int(values[0].real)


def _mia_info(path: Path) -> MiaProbeInfo:
    if not path.is_file():
        return MiaProbeInfo()
    try:
        return MiaProbeInfo.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path}: cannot be read as MIA's probe.json") from error


def _weights(path: Path, tensors: Mapping[str, Any]) -> HNodeWeights:
    """Raises ``ModelConfigError`` for numbers that cannot be."""
    weight, scale, indices = tensors[WEIGHT], tensors[SCALE], tensors[INDICES].astype(np.int64).reshape(-1)
    if tensors[BIAS].shape != (1,):
        raise ModelConfigError(f"{path}: the bias is one number, not {list(tensors[BIAS].shape)}")
    if len(indices) > MAX_NODES or (indices < 0).any() or (indices >= len(weight)).any():
        raise ModelConfigError(f"{path}: H-Nodes are at most {MAX_NODES} indices below {len(weight)}")
    if not (scale > 0).all():
        raise ModelConfigError(f"{path}: scales are positive")
    return HNodeWeights(weight, float(tensors[BIAS][0]), tensors[MEAN], scale, indices, tensors[BASELINES].reshape(-1))
