"""A detector that a policy can do without, for a model that has no calibration of it.

Owns what stands in its place: it reads nothing, and its score is unavailable with the reason, so that rules about it
follow their ``on_error``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import nan
from pathlib import Path

from detectors.base import CapturePlan, Score
from guard.mia.results import Readout


class NeverReached(Mapping[str, float]):
    """Thresholds of whatever name a rule uses, for a detector that never has a score to compare with them."""

    def __getitem__(self, name: str) -> float:
        return nan

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class AbsentDetector:
    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.thresholds: Mapping[str, float] = NeverReached()
        self.reason = f"this model has no calibration of {kind}: {path.name} is missing"

    def plan(self) -> CapturePlan:
        return CapturePlan()

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        return Score("unavailable", reason=self.reason)
