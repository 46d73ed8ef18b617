"""What one conversation is read for: the plan's captures and those of extras, as one spec that the engine gets.

Owns the names of the plan's captures, and that everything which is still to be read of a row is read in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from detectors.calibration.demands import has_instruction
from detectors.calibration.feature_store import Plan
from detectors.calibration.rows import Message, Row
from detectors.windows import DATA, INSTRUCTION, TEXTS
from guard.mia.results import Readouts
from guard.mia.spec import AttentionCapture, HiddenCapture, MiaSpec, SpanPositions


@dataclass(frozen=True)
class Captures:
    """By names that no other captures have. Their spans are the tracker's. ``answer_tokens``: how many tokens of the
    model's answer something is read from."""

    hidden: Mapping[str, HiddenCapture] = field(default_factory=dict)
    attention: Mapping[str, AttentionCapture] = field(default_factory=dict)
    answer_tokens: int = 0


class Extra(Protocol):
    """Something that is read of some rows beside the plan, and kept by itself."""

    @property
    def captures(self) -> Captures: ...

    def lacks(self, row: Row) -> bool:
        """Whether it is still to be read of this row."""
        ...

    def take(self, row: Row, readouts: Readouts) -> None:
        """Keep what came. Raises ``FeatureError`` for a row without complete readouts."""
        ...


def plan_captures(plan: Plan, conversation: Sequence[Message]) -> Captures:
    """Of a conversation without an instruction no attention, which would be unavailable."""
    with_heads = plan.heads and has_instruction(conversation)
    return Captures(
        hidden={
            **{f"last{layer}": HiddenCapture(layer=layer) for layer in plan.layers},
            **{f"data{n}": of_data(n) for n in plan.window_layers},
        },
        attention={"a": AttentionCapture(heads=plan.heads, spans=(INSTRUCTION, DATA))} if with_heads else {},
    )


def of_data(layer: int) -> HiddenCapture:
    """Every token of the data."""
    return HiddenCapture(layer=layer, positions=SpanPositions(span=DATA))


def spec_of(conversation: Sequence[Message], parts: Sequence[Captures]) -> MiaSpec:
    instructed = has_instruction(conversation)
    return MiaSpec(
        spans={name: selectors for name, selectors in TEXTS.items() if instructed or name != INSTRUCTION},
        hidden={name: capture for part in parts for name, capture in part.hidden.items()},
        attention={name: capture for part in parts for name, capture in part.attention.items()},
    )
