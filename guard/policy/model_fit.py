"""Whether a policy's detectors and steering can be of a model at all: its layers, heads and width.

Owns reading these from the model's ``config.json``, and the words of what does not fit. No engine can serve that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectors.base import AnyDetector
from detectors.engine_probes import plan_of
from guard.policy.bound import BoundPolicy


@dataclass(frozen=True)
class _Shape:
    """None for what ``config.json`` does not say."""

    layers: int | None
    heads: int | None
    hidden_size: int | None


def misfits(policy: BoundPolicy, model: Path | None) -> list[str]:
    """What the model does not have. model: its folder; nothing is found where that is not known or says no sizes."""
    shape = _shape(model) if model is not None else None
    return [] if shape is None else [*_of_detectors(policy, shape), *_of_steering(policy, shape)]


def _of_detectors(policy: BoundPolicy, shape: _Shape) -> Iterator[str]:
    for name, detector in policy.detectors.items():
        plan = plan_of(detector)
        heads = list(dict.fromkeys(head for one in plan.attention.values() for head in one.heads))
        read = {one.layer for one in plan.hidden.values()} | {one.layer for one in plan.probes.values()}
        said, first = f"detector {name}: its {detector.kind}", _first_block(detector)
        if beyond := _beyond(read, shape):
            yield f"{said} reads {beyond}: another model's file?"
        if beyond := _beyond({layer for layer, _ in heads}, shape, first):
            yield f"{said} reads heads of {beyond}: another model's file?"
        if shape.heads is not None and (lacking := [head for head in heads if head[1] >= shape.heads]):
            named = [[layer - 1 + first, head] for layer, head in lacking[:8]]
            yield f"{said} reads heads {named}, and each layer of the model has {shape.heads}: another model's?"
        size = getattr(getattr(getattr(detector, "config", None), "params", None), "hidden_size", None)
        if None not in (size, shape.hidden_size) and size != shape.hidden_size:
            yield f"{said} is for states of {size} components, and the model's have {shape.hidden_size}: another model?"


def _of_steering(policy: BoundPolicy, shape: _Shape) -> Iterator[str]:
    for compiled in policy.rules:
        if beyond := _beyond({steer.layer for steer in compiled.rule.steer}, shape):
            yield f"rule {compiled.rule.name}: steers at {beyond}"


def _first_block(detector: AnyDetector) -> int:
    """The number that the detector's file gives the layer of the first block's heads."""
    params = getattr(getattr(detector, "config", None), "params", None)
    return 0 if hasattr(params, "important_heads") else 1


def _beyond(layers: set[int], shape: _Shape, first: int = 1) -> str:
    """layers: of blocks, counted from 1; first: what the words count from."""
    lacking = sorted(layer - 1 + first for layer in layers if shape.layers is not None and layer > shape.layers)
    counted = "" if first else ", counted from 0"
    return f"layer {', '.join(map(str, lacking))}, and the model has {shape.layers} layers{counted}" if lacking else ""


def _shape(model: Path) -> _Shape | None:
    try:
        whole: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # what starts the engine, or loads the model, says that
    text = whole.get("text_config", whole)

    def number(*names: str) -> int | None:
        return next((value for name in names if isinstance(value := text.get(name), int)), None)

    layers, heads = number("num_hidden_layers", "n_layer"), number("num_attention_heads", "n_head")
    return _Shape(layers, heads, number("hidden_size", "n_embd"))
