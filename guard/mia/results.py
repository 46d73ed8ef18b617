"""What one request gets back: readouts by capture name, each with a status, and their wire form.

Owns the JSON that the API server adds to an answer. Never touches torch or vLLM. A readout that is not ``complete``
says why; a consumer must treat it as "no score", never as "clean".
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Status = Literal["complete", "dropped", "unavailable"]
Stage = Literal["prompt", "final"]

EVENT_OBJECT = "mia.readouts"
"""Value of ``object`` in the extra chunk of a stream."""


@dataclass(frozen=True)
class HiddenReadout:
    """One residual-stream vector. ``values``: ``[hidden_size]`` float32, None unless complete."""

    status: Status
    layer: int
    position: int | None = None
    token_id: int | None = None
    values: FloatArray | None = None
    reason: str = ""


@dataclass(frozen=True)
class RowsReadout:
    """Residual-stream vectors of several tokens, in the order of the text.

    values: ``[len(positions), hidden_size]`` float32, None unless complete. positions count from the prompt's first
    token on through the generated ones; token_ids are the tokens there, so that a consumer can check.
    """

    status: Status
    layer: int
    positions: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    values: FloatArray | None = None
    reason: str = ""


@dataclass(frozen=True)
class AttentionReadout:
    """Attention of chosen heads from one token, in the order of ``heads``.

    ``mass[span]``: ``[len(heads)]`` float32 in 0..1. weights: ``[len(heads), prompt tokens]`` float32 when asked for.
    """

    status: Status
    heads: tuple[tuple[int, int], ...]
    position: int | None = None
    mass: dict[str, FloatArray] = field(default_factory=dict)
    reason: str = ""
    weights: FloatArray | None = None


Readout = HiddenReadout | RowsReadout | AttentionReadout


@dataclass(frozen=True)
class Readouts:
    """Readouts of one choice at one stage: ``prompt`` once the prompt was read, ``final`` when the answer ended.

    ``span_tokens``: the resolved token ranges of the named spans.
    """

    items: dict[str, Readout]
    span_tokens: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    prompt_tokens: int = 0
    prompt_index: int = 0
    choice_index: int = 0
    stage: Stage = "prompt"

    def to_wire(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "prompt_index": self.prompt_index,
            "choice_index": self.choice_index,
            "prompt_tokens": self.prompt_tokens,
            "span_tokens": {name: [list(r) for r in ranges] for name, ranges in self.span_tokens.items()},
            "items": {name: item_to_wire(item) for name, item in self.items.items()},
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Readouts:
        """Inverse of ``to_wire``. Raises ``KeyError`` or ``ValueError`` on anything else."""
        return cls(
            items={name: item_from_wire(item) for name, item in wire["items"].items()},
            span_tokens={
                name: tuple((int(a), int(b)) for a, b in ranges) for name, ranges in wire["span_tokens"].items()
            },
            prompt_tokens=int(wire["prompt_tokens"]),
            prompt_index=int(wire["prompt_index"]),
            choice_index=int(wire["choice_index"]),
            stage=wire["stage"],
        )


def array_to_wire(values: FloatArray) -> dict[str, Any]:
    """float32, little endian, base64: a tenth of the size and time of a JSON list of floats."""
    raw = np.ascontiguousarray(values, dtype="<f4").tobytes()
    return {"dtype": "float32", "shape": list(values.shape), "data": base64.b64encode(raw).decode()}


def array_from_wire(wire: dict[str, Any]) -> FloatArray:
    if wire["dtype"] != "float32":
        raise ValueError(f"dtype {wire['dtype']!r} is not float32")
    return np.frombuffer(base64.b64decode(wire["data"], validate=True), dtype="<f4").reshape(wire["shape"])


def with_token_ids(item: Readout, token_ids: Sequence[int]) -> Readout:
    """The readout with the tokens at its positions. token_ids: those of prompt and answer, in order."""
    if isinstance(item, HiddenReadout) and item.position is not None:
        return replace(item, token_id=token_ids[item.position])
    if isinstance(item, RowsReadout):
        return replace(item, token_ids=tuple(token_ids[position] for position in item.positions))
    return item


def join_rows(parts: list[RowsReadout]) -> RowsReadout:
    """Rows that came one after the other, as one readout. Any part that is not complete makes the whole so."""
    first = parts[0]
    for part in parts:
        if part.status != "complete":
            return part
    return RowsReadout(
        "complete",
        first.layer,
        tuple(position for part in parts for position in part.positions),
        tuple(token for part in parts for token in part.token_ids),
        np.concatenate([part.values for part in parts if part.values is not None]),
    )


def item_to_wire(item: Readout) -> dict[str, Any]:
    wire: dict[str, Any] = {"status": item.status}
    if item.reason:
        wire["reason"] = item.reason
    if isinstance(item, AttentionReadout):
        mass = {span: array_to_wire(mass) for span, mass in item.mass.items()}
        heads = [list(head) for head in item.heads]
        if item.weights is not None:
            wire["weights"] = array_to_wire(item.weights)
        return wire | {"kind": "attention", "position": item.position, "heads": heads, "mass": mass}
    if item.values is not None:
        wire["values"] = array_to_wire(item.values)
    if isinstance(item, RowsReadout):
        positions, token_ids = list(item.positions), list(item.token_ids)
        return wire | {"kind": "rows", "layer": item.layer, "positions": positions, "token_ids": token_ids}
    return wire | {"kind": "hidden", "layer": item.layer, "position": item.position, "token_id": item.token_id}


def rows_from_wire(wire: dict[str, Any]) -> RowsReadout:
    """``item_from_wire`` for what must be rows. Raises ``ValueError`` on anything else."""
    item = item_from_wire(wire)
    if not isinstance(item, RowsReadout):
        raise ValueError(f"kind {wire['kind']!r} is not rows")
    return item


def item_from_wire(wire: dict[str, Any]) -> Readout:
    status, kind = wire["status"], wire["kind"]
    if status not in ("complete", "dropped", "unavailable"):
        raise ValueError(f"unknown status {status!r}")
    reason = wire.get("reason", "")
    if kind == "attention":
        heads = tuple((int(layer), int(head)) for layer, head in wire["heads"])
        mass = {span: array_from_wire(mass) for span, mass in wire["mass"].items()}
        weights = array_from_wire(wire["weights"]) if "weights" in wire else None
        return AttentionReadout(status, heads, wire["position"], mass, reason, weights)
    values = array_from_wire(wire["values"]) if "values" in wire else None
    if kind == "rows":
        positions, token_ids = tuple(map(int, wire["positions"])), tuple(map(int, wire["token_ids"]))
        return RowsReadout(status, int(wire["layer"]), positions, token_ids, values, reason)
    if kind == "hidden":
        return HiddenReadout(status, int(wire["layer"]), wire["position"], wire["token_id"], values, reason)
    raise ValueError(f"unknown kind {kind!r}")
