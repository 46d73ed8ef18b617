"""What the model computes on each row, read through the engine as served traffic will be.

Owns the one pass over the rows. Which layer and heads matter is chosen later, so all are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from detectors.attention_tracker import DATA, DEFAULT_SPANS, INSTRUCTION
from detectors.calibration.rows import Row
from guard.mia.engine_config import EngineConfig
from guard.mia.results import AttentionReadout, FloatArray, HiddenReadout, Readout, Readouts
from guard.mia.spec import MAX_CAPTURES, AttentionCapture, HiddenCapture, MiaSpec

MAX_MODEL_LEN = 4096


class FeatureError(RuntimeError):
    """The engine gave no readout for a row; the message names the row and the reason, never its text."""


@dataclass(frozen=True)
class ModelShape:
    layers: int
    heads: int
    hidden_size: int


@dataclass(frozen=True)
class Features:
    """hidden: ``[rows, layers, hidden_size]``; focus: ``[rows, heads, 2]``, masses on instruction and data; float32."""

    layers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    hidden: FloatArray
    mass: FloatArray


def model_shape(model: Path) -> ModelShape:
    """From the model folder's ``config.json``; multimodal models keep theirs under ``text_config``."""
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = raw.get("text_config", raw)
    return ModelShape(config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"])


def read_features(model: Path, rows: Sequence[Row], progress: Callable[[int], None] | None = None) -> Features:
    """Read all rows with one engine. Raises ``FeatureError`` for a row without complete readouts."""
    shape = model_shape(model)
    layers = candidate_layers(shape.layers)
    heads = tuple((layer, head) for layer in range(1, shape.layers + 1) for head in range(shape.heads))
    spec = MiaSpec(
        spans=dict(DEFAULT_SPANS),
        hidden={f"h{layer}": HiddenCapture(layer=layer) for layer in layers},
        attention={"a": AttentionCapture(heads=heads, spans=(INSTRUCTION, DATA))},
    )
    with open_engine(model, EngineConfig(hidden_layers=layers, attention_heads=heads)) as llm:
        readouts = llm.read([row.messages for row in rows], spec, progress)
    hidden = np.empty((len(rows), len(layers), shape.hidden_size), np.float32)
    mass = np.empty((len(rows), len(heads), 2), np.float32)
    for i, (row, one) in enumerate(zip(rows, readouts, strict=True)):
        hidden[i], mass[i] = _row_features(row, one, layers)
    return Features(layers, heads, hidden, mass)


def candidate_layers(count: int) -> tuple[int, ...]:
    """All block outputs, or as many evenly spaced ones as one request may read."""
    most = MAX_CAPTURES - 1
    if count <= most:
        return tuple(range(1, count + 1))
    return tuple(sorted({round(1 + i * (count - 1) / (most - 1)) for i in range(most)}))


def open_engine(model: Path, config: EngineConfig) -> Any:
    """An offline engine with these taps. Float32 on a CPU, where it is both exact and fastest; else the model's own."""
    import torch

    from guard.mia.llm import MiaLLM

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    dtype = "auto" if torch.cuda.is_available() else "float32"
    return MiaLLM(model, config, dtype=dtype, max_model_len=MAX_MODEL_LEN)


def _row_features(row: Row, readouts: Readouts, layers: Sequence[int]) -> tuple[FloatArray, FloatArray]:
    states = []
    for layer in layers:
        hidden = readouts.items.get(f"h{layer}")
        if not isinstance(hidden, HiddenReadout) or hidden.values is None:
            raise FeatureError(f"row {row.id}: no hidden state of layer {layer}: {_reason(hidden)}")
        states.append(hidden.values)
    attention = readouts.items.get("a")
    if not isinstance(attention, AttentionReadout) or attention.status != "complete":
        raise FeatureError(f"row {row.id}: no attention readout: {_reason(attention)}")
    return np.stack(states), np.stack([attention.mass[INSTRUCTION], attention.mass[DATA]], axis=-1)


def _reason(readout: Readout | None) -> str:
    return "nothing came back" if readout is None else f"{readout.status} {readout.reason}".strip()
