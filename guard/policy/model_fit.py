"""Whether a policy's detectors and steering can be of a model at all: its layers, heads and width.

Owns reading these from the model's ``config.json``, and the words of what does not fit. No engine can serve that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        heads = [head for one in plan.attention.values() for head in one.heads]
        read = {one.layer for one in plan.hidden.values()} | {one.layer for one in plan.probes.values()}
        read |= {layer for layer, _ in heads}
        said = f"detector {name}: its {detector.kind}"
        if beyond := _beyond(read, shape):
            yield f"{said} reads {beyond}: another model's file?"
        if shape.heads is not None and (lacking := [list(one) for one in heads if one[1] >= shape.heads]):
            yield f"{said} reads heads {lacking[:8]}, and each layer of the model has {shape.heads}: another model's?"
        size = getattr(getattr(getattr(detector, "config", None), "params", None), "hidden_size", None)
        if None not in (size, shape.hidden_size) and size != shape.hidden_size:
            yield f"{said} is for states of {size} components, and the model's have {shape.hidden_size}: another model?"


def _of_steering(policy: BoundPolicy, shape: _Shape) -> Iterator[str]:
    for compiled in policy.rules:
        if beyond := _beyond({steer.layer for steer in compiled.rule.steer}, shape):
            yield f"rule {compiled.rule.name}: steers at {beyond}"


def _beyond(layers: set[int], shape: _Shape) -> str:
    lacking = sorted(layer for layer in layers if shape.layers is not None and layer > shape.layers)
    return f"layer {', '.join(map(str, lacking))}, and the model has {shape.layers} layers" if lacking else ""


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
