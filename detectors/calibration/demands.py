"""Which rows a detector can read, and whether there are enough of them.

Owns these demands, so that calibration and evaluation leave out the same rows, and say so before an engine starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from detectors.calibration.rows import Message, Row
from detectors.calibration.sources import DataError
from detectors.calibration.split import SPLITS

LEAST_PER_LABEL = 20
"""Rows of each label in each split, below which nothing can be fitted or measured."""

LEAST_MEASURED = 10
"""Rows of either label, below which nothing is measured on them."""


@dataclass(frozen=True)
class Demand:
    """``which``: the rows, behind the word "rows". ``otherwise``: why a row is none of them; empty where that is no
    fault of the row."""

    met: Callable[[Row], bool]
    which: str
    otherwise: str = ""


def has_instruction(messages: Sequence[Message]) -> bool:
    """Whether there is an instruction that attention may stay on."""
    return any(message["role"] == "system" for message in messages)


DEMANDS: Mapping[str, Demand] = {
    "attention_tracker": Demand(
        lambda row: has_instruction(row.messages),
        "with a message of the role system",
        "messages: none of the role system, whose attention attention_tracker measures",
    ),
    # Others than rows that end with what a tool returned are no steps of an agent.
    "tool_call_risk": Demand(lambda row: row.place == "tool", "that end with a message of the role tool"),
}
"""By kind. Every other kind reads every row."""


def readable(kind: str, rows: Sequence[Row]) -> list[int]:
    """Which of ``rows`` the kind reads."""
    demand = DEMANDS.get(kind)
    return [i for i, row in enumerate(rows) if demand is None or demand.met(row)]


def measurable(rows: Sequence[Row], which: str = "") -> None:
    """Raise ``DataError`` unless there are enough ``rows`` of either label to measure a detector on."""
    counts = Counter(row.label for row in rows)
    if min(counts["benign"], counts["attack"]) < LEAST_MEASURED:
        raise DataError(
            f"of the held-out rows{which} {counts['benign']} are benign and {counts['attack']} are attacks; "
            f"{LEAST_MEASURED} of each are needed"
        )


def lacking(kind: str, rows: Sequence[Row]) -> str:
    """Why the kind cannot be fitted to ``rows``; empty when it can."""
    counts = Counter((rows[i].split, rows[i].label) for i in readable(kind, rows))
    if kind not in DEMANDS or all(
        counts[split, y] >= LEAST_PER_LABEL for split in SPLITS for y in ("benign", "attack")
    ):
        return ""
    return (
        f"it needs {LEAST_PER_LABEL} rows of each label in each split {DEMANDS[kind].which}; the data has fewer, or "
        "the model's template does not know that role" + _first_unread(kind, rows)
    )


def told(kind: str, rows: Sequence[Row]) -> str:
    """How many rows the kind leaves out that another one reads, and which the first is; empty when there are none."""
    if kind not in DEMANDS or not DEMANDS[kind].otherwise:
        return ""
    count = len(rows) - len(readable(kind, rows))
    return f"{kind} leaves out {count} of {len(rows)} rows{_first_unread(kind, rows)}" if count else ""


def _first_unread(kind: str, rows: Sequence[Row]) -> str:
    demand = DEMANDS[kind]
    first = next((row for row in rows if not demand.met(row)), None)
    return f" (the first: {first.named}: {demand.otherwise})" if first is not None and demand.otherwise else ""
