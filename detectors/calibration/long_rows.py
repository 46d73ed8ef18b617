"""Benign rows for probes with windows: the set ``long-documents``, and long benign rows of the user's own.

Owns these rows, and which of them are fitted to: half of the packages, and of own rows those that are not held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from detectors.calibration.rows import Composer, Row
from detectors.calibration.sets.content import number_of
from detectors.calibration.sets.long_benign import NAME, LongDocument, long_documents
from detectors.calibration.sources import own_frames
from detectors.calibration.split import Split
from detectors.windows import Windows, passes_of

OWN = "own rows"
"""The kind of the user's own."""


@dataclass(frozen=True)
class LongRow:
    """``kind``: of document. ``package``: what is never fitted to in part."""

    row: Row
    kind: str
    package: str

    @property
    def fitted(self) -> bool:
        return self.row.split != "held_out"


def long_rows(seed: int, tool_role: bool) -> list[LongRow]:
    """The set's documents, pasted by a user or returned by a tool. Raises ``DataError`` where a wheel is not there."""
    composer, documents = Composer(seed, own_frames(), tool_role), long_documents()
    fitted = half_of(documents, seed)
    found = []
    for one in documents:
        split: Split = "train" if one.package in fitted else "held_out"
        row = Row(one.id, NAME, one.id, split, "benign", one.lang)
        found.append(LongRow(composer.brought(row, one.text), one.kind, one.package))
    return found


def half_of(documents: Sequence[LongDocument], seed: int) -> set[str]:
    """Packages with half of the documents, in an order that the seed decides."""
    counts: dict[str, int] = {}
    for one in documents:
        counts[one.package] = counts.get(one.package, 0) + 1
    some: set[str] = set()
    count = 0
    for package in sorted(counts, key=lambda name: number_of(f"{seed}|half|{name}")):
        if count + counts[package] <= len(documents) / 2:
            some.add(package)
            count += counts[package]
    return some


def own_long_rows(rows: Sequence[Row], windows: Windows) -> list[LongRow]:
    """Of the user's own rows the benign ones that have windows."""
    own = [row for row in rows if row.origin and row.label == "benign"]
    return [LongRow(row, OWN, row.group) for row in own if passes_of(row.messages, windows)[0]]
