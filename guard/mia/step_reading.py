"""What one engine step gives for one request, between the engine's core and the front end.

Owns that wire form. Rows of the residual stream are named in it, and stay in the worker's ring until the front end
takes them out. Never touches torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from guard.mia.results import RAW, Readout, Status, SteeringReport


@dataclass(frozen=True)
class RingRows:
    """Where rows lie: ``segments`` of (begin, rows), begins counted in bytes since the ring was made.

    ``path``: how another process opens the ring, and behind ``#`` its inode. ``dtype``: of the rows, as torch calls it;
    ``width``: elements of one.
    """

    path: str
    dtype: str
    width: int
    segments: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class RingReadout:
    """Residual-stream vectors of several tokens that lie in a ring; ``rows`` is None unless complete."""

    status: Status
    layer: int
    positions: tuple[int, ...] = ()
    rows: RingRows | None = None
    reason: str = ""
    kind: Literal["ring"] = "ring"


Part = Annotated[Readout | RingReadout, Field(discriminator="kind")]


def join_ring(parts: Sequence[RingReadout]) -> RingReadout:
    """Rows that came one after the other. Any part that is not complete makes the whole so."""
    for part in parts:
        if part.rows is None:
            return part
    positions = tuple(position for part in parts for position in part.positions)
    segments = [segment for part in parts if part.rows is not None for segment in part.rows.segments]
    first = parts[0]
    assert first.rows is not None
    return replace(first, positions=positions, rows=replace(first.rows, segments=segments))


@dataclass(frozen=True)
class StepReading:
    """``prompt``: readouts of the prompt, with the first output after it ended, else None. ``grown``: new rows of the
    captures that go on while the answer is generated; they are put together at its end. ``steering``: up to now, with
    the prompt and at the end."""

    prompt: dict[str, Part] | None = None
    grown: dict[str, Part] = field(default_factory=dict)
    steering: tuple[SteeringReport, ...] = ()

    def __bool__(self) -> bool:
        return self.prompt is not None or bool(self.grown) or bool(self.steering)

    def to_wire(self) -> dict[str, Any]:
        """For msgpack or pickle: arrays as bytes."""
        wire: dict[str, Any] = _step_reading.dump_python(self, context=RAW)
        return wire

    @classmethod
    def from_wire(cls, wire: Any) -> StepReading:
        return _step_reading.validate_python(wire)


_step_reading = TypeAdapter(StepReading)
