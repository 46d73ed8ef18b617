"""Linear readouts of the residual stream that several detectors share: their weights' file, captures, and logits.

Owns the safetensors file beside a detector's JSON, and the two ways to ``sum over layers of weight . x + bias``: the
states leave the engine and are multiplied here, or the engine multiplies and only logits leave it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load

from detectors.base import CapturePlan, EngineProbe, Score, TokenValues
from detectors.model_config import ModelConfigError, Section
from guard.mia.results import FloatArray, HiddenMeanReadout, HiddenReadout, ProbeReadout, Readout, RowsReadout
from guard.mia.spec import HiddenCapture, Layer, Positions

WEIGHT, BIAS = "weight", "bias"

Logits = npt.NDArray[np.float64]
WeightsFile = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+\.safetensors$")]


class LinearParams(Section):
    """What every detector's file says that reads the residual stream through plain weights."""

    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=64)]
    """Layers read, in the order of the weights; numbers as in transformers' ``hidden_states``: 0 the embedding."""
    hidden_size: Annotated[int, Field(ge=1)]
    weights: WeightsFile
    """Name of a file in this file's folder: ``weight`` [layers x hidden_size] and ``bias`` [1], float32."""
    weights_sha256: str
    """Of that file, so that the thresholds here are never used with other weights."""


_Rows = tuple[FloatArray, tuple[int, ...], tuple[int, ...]]
"""What was read at each token, ``[positions, columns]``; the positions, and the tokens there. A mean is one row at the
last of its tokens."""


@dataclass(frozen=True)
class TokenLogits:
    """``logits``: ``[positions, outputs]`` float64, in the order of the text. ``token_ids``: the tokens there."""

    logits: Logits
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LinearReader:
    """One readout at ``positions``. weight: ``[outputs, layers, hidden_size]`` float32, bias: ``[outputs]``.

    ``name`` begins the names of its captures. ``average``: of states that leave the engine, their mean alone does: the
    mean of the logits is the logit of the mean state. ``in_engine``: the engine, which was started with the weights,
    multiplies; any engine with taps at the layers will do otherwise.
    """

    layers: tuple[int, ...]
    weight: FloatArray
    bias: FloatArray
    positions: Positions
    name: str = "layer"
    average: bool = False
    in_engine: bool = False

    @cached_property
    def _columns(self) -> tuple[Logits, ...]:
        """Of each layer its weights ``[hidden_size, outputs]``, in float64: a sum over layers keeps its digits."""
        return tuple(np.ascontiguousarray(self.weight[:, i].T, np.float64) for i in range(len(self.layers)))

    @cached_property
    def _joined(self) -> Logits:
        """The same of all layers, one under the other."""
        joined: Logits = np.concatenate(self._columns)
        return joined

    @cached_property
    def _bias(self) -> Logits:
        return self.bias.astype(np.float64)

    def plan(self, spans: Mapping[str, tuple[str, ...]] | None = None) -> CapturePlan:
        if not self.in_engine:
            captures = {
                self._capture(layer): HiddenCapture(layer=layer, positions=self.positions, average=self.average)
                for layer in self.layers
            }
            return CapturePlan(hidden=captures, spans=spans or {})
        probes = {
            # The bias counts once, however many layers add up.
            self._capture(layer): EngineProbe(
                layer, self.weight[:, i], self.bias if i == 0 else np.zeros_like(self.bias), self.positions
            )
            for i, layer in enumerate(self.layers)
        }
        return CapturePlan(probes=probes, spans=spans or {})

    def at(self, positions: Positions) -> LinearReader:
        """The same, read elsewhere, token by token."""
        return replace(self, positions=positions, average=False)

    def probabilities(self, readouts: Mapping[str, Readout]) -> TokenValues | Score:
        """Of the first output, at every token that was read."""
        read = self.read(readouts)
        return (
            read if isinstance(read, Score) else TokenValues(tuple(sigmoid(read.logits[:, 0]).tolist()), read.positions)
        )

    def read(self, readouts: Mapping[str, Readout]) -> TokenLogits | Score:
        """The logits of every token that was read; a ``Score`` that says why where there are none."""
        rows: list[_Rows] = []
        for layer, name in zip(self.layers, self._names, strict=True):
            one = self._rows(layer, readouts.get(name))
            if isinstance(one, Score):
                return one
            if rows and one[1] != rows[0][1]:
                return _missing(f"layer {layer} was read at other tokens than layer {self.layers[0]}")
            rows.append(one)
        logits = self._logits([values for values, _, _ in rows])
        if not np.isfinite(logits).all():
            return _missing("hidden state is not finite")
        _, positions, token_ids = rows[0]
        return TokenLogits(logits, positions, token_ids)

    def _logits(self, values: list[FloatArray]) -> Logits:
        """Of each layer's values: states ``[tokens, hidden_size]``, or the logits that the engine made of them."""
        if self.in_engine:
            added: Logits = np.sum(values, axis=0, dtype=np.float64)
            return added
        if len(values[0]) == 1:
            # One product for all layers: of a single token, what each call costs is more than what it computes.
            states: Logits = np.concatenate(values, axis=1, dtype=np.float64)
            return states @ self._joined + self._bias
        products = (one.astype(np.float64) @ columns for one, columns in zip(values, self._columns, strict=True))
        return sum(products, self._bias)

    def _rows(self, layer: int, readout: Readout | None) -> _Rows | Score:
        if self.in_engine:
            return self._engine_logits(layer, readout)
        states = _states(layer, readout)
        if isinstance(states, Score):
            return states
        values, positions, token_ids = states
        size = self.weight.shape[2]
        if not positions:
            # Of an answer of one token nothing is read: the last one is never fed to the model.
            values = np.zeros((0, size), np.float32)
        if values.shape != (len(positions), size):
            return _missing(
                f"hidden state of layer {layer} has shape {list(values.shape[1:])}, "
                f"the weights were fitted on [{size}]: another model?"
            )
        return values, positions, token_ids

    def _engine_logits(self, layer: int, readout: Readout | None) -> _Rows | Score:
        if not isinstance(readout, ProbeReadout):
            return _missing(f"no logits of layer {layer} came back")
        if readout.status != "complete":
            return _missing(readout.reason or f"logits of layer {layer} {readout.status}")
        logits = np.zeros((0, len(self.bias)), np.float32) if readout.logits is None else readout.logits
        if logits.shape != (len(readout.positions), len(self.bias)):
            return _missing(f"logits of layer {layer} have shape {list(logits.shape)}: another probe?")
        return logits, readout.positions, readout.token_ids

    def _capture(self, layer: int) -> str:
        return f"{self.name}{layer}"

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(map(self._capture, self.layers))


def _states(layer: int, readout: Readout | None) -> _Rows | Score:
    """Vectors ``[positions, hidden_size]`` of one token or of several, and where they are."""
    if not isinstance(readout, HiddenReadout | RowsReadout | HiddenMeanReadout):
        return _missing(f"no hidden state of layer {layer} came back")
    if readout.status != "complete" or (isinstance(readout, HiddenReadout) and readout.values is None):
        return _missing(readout.reason or f"hidden state of layer {layer} {readout.status}")
    if isinstance(readout, RowsReadout):
        values = np.zeros((0, 0), np.float32) if readout.values is None else readout.values
        return values, readout.positions, readout.token_ids
    if isinstance(readout, HiddenMeanReadout):
        if readout.values is None:
            return np.zeros((0, 0), np.float32), (), ()
        return readout.values[None], (readout.tokens[-1][1] - 1,), ()
    assert readout.values is not None
    token_ids = () if readout.token_id is None else (readout.token_id,)
    return readout.values[None], (readout.position or 0,), token_ids


def load_tensors(path: Path, sha256: str) -> dict[str, FloatArray]:
    """The tensors of a weights file. Raises ``ModelConfigError`` unless it has this hash and only finite numbers."""
    try:
        raw = path.read_bytes()
        tensors = load(raw)
    except (OSError, SafetensorError) as error:
        raise ModelConfigError(f"{path}: cannot be read as safetensors: {error}") from error
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        raise ModelConfigError(
            f"{path}: SHA-256 is {found}, the JSON beside it was written for {sha256}; "
            "take both from the same calibration"
        )
    if not all(np.isrealobj(tensor) and np.isfinite(tensor).all() for tensor in tensors.values()):
        raise ModelConfigError(f"{path}: weights are not finite numbers")
    return tensors


def check_shapes(path: Path, tensors: Mapping[str, FloatArray], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ``ModelConfigError`` unless each of ``shapes`` is there as it must be."""
    if any(name not in tensors or tensors[name].shape != tuple(shape) for name, shape in shapes.items()):
        wanted = " and ".join(f"{name!r} {list(shape)}" for name, shape in shapes.items())
        found = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise ModelConfigError(f"{path}: must hold {wanted}, not {found}")


def load_linear(folder: Path, params: LinearParams) -> tuple[FloatArray, FloatArray]:
    """Weight ``[1, layers, hidden_size]`` and bias ``[1]``. Raises ``ModelConfigError``."""
    path = folder / params.weights
    tensors = load_tensors(path, params.weights_sha256)
    layers, size = len(params.layers), params.hidden_size
    check_shapes(path, tensors, {WEIGHT: (layers * size,), BIAS: (1,)})
    return tensors[WEIGHT].reshape(1, layers, size).astype(np.float32), tensors[BIAS].astype(np.float32)


def sigmoid(logits: npt.ArrayLike) -> Logits:
    """The logistic function, without overflow at either end."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=np.float64))))


def _missing(reason: str) -> Score:
    return Score("unavailable", reason=reason)
