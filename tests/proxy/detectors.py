"""Detectors that tests register: one that reads text, and one that reads what the model computes while it answers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from detectors import registry
from detectors.base import CapturePlan, Score
from guard.mia.results import Readout, RowsReadout
from guard.mia.spec import HiddenCapture


@dataclass
class Words:
    """1 where a text has ``secret``, in letters of any size, or digits in a row, else 0."""

    kind: str = "words"
    thresholds: Mapping[str, float] = None  # type: ignore[assignment]

    def score_text(self, text: str) -> Score:
        if "explode" in text:
            raise RuntimeError(text)
        if "slow" in text:
            time.sleep(0.6)  # as a detector of somebody else's may
        spans = tuple(match.span() for match in re.finditer(r"(?i:secret)|\d{4,}", text))
        return Score("scored", 1.0 if spans else 0.0, spans=spans)


@dataclass
class Share:
    """The share of words that are bad, as of a detector that a long text dilutes."""

    kind: str = "share"
    thresholds: Mapping[str, float] = field(default_factory=dict)

    def score_text(self, text: str) -> Score:
        words = text.split()
        return Score("scored", words.count("bad") / max(1, len(words)))


@dataclass
class Drift:
    """The highest value of a hidden state of the answer."""

    kind: str = "drift"
    thresholds: Mapping[str, float] = None  # type: ignore[assignment]

    def plan(self) -> CapturePlan:
        return CapturePlan(hidden={"rows": HiddenCapture(layer=3, positions="generated")})

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        rows = readouts.get("rows")
        if not isinstance(rows, RowsReadout) or rows.values is None:
            return Score("unavailable", reason="no rows came back")
        return Score("scored", float(np.max(rows.values)))


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(_path: Path) -> Words:
        return Words(thresholds={})

    def drift(_path: Path) -> Drift:
        return Drift(thresholds={})

    monkeypatch.setitem(registry.BUILT_IN, "words", words)
    monkeypatch.setitem(registry.BUILT_IN, "drift", drift)
