"""Detectors by kind, ours and others'."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from detectors import registry
from detectors.attention_tracker import AttentionTracker
from detectors.base import CapturePlan, Detector, Score
from detectors.registry import UnknownDetectorError, build_detector, detector_kinds


class Constant:
    """What another distribution might register."""

    kind = "constant"
    thresholds = {"half": 0.5}  # noqa: RUF012

    def __init__(self, path: Path) -> None:
        self.path = path

    def plan(self) -> CapturePlan:
        return CapturePlan()

    def score(self, readouts: object) -> Score:
        return Score("scored", 1.0)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    points = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name, f"{__name__}:Constant", registry.GROUP) for name in ("constant", "probe")
    )
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))


def test_builds_a_built_in_kind_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({"model_info": {"name": "tiny"}, "params": {"important_heads": [[0, 1]]}}))
    detector = build_detector("attention_tracker", path)
    assert isinstance(detector, AttentionTracker)
    assert detector.thresholds == {}


@pytest.mark.usefixtures("registered")
def test_builds_a_kind_that_another_distribution_registered(tmp_path: Path) -> None:
    detector: Detector = build_detector("constant", tmp_path / "x.json")
    assert detector.score({}).value == 1.0
    assert "constant" in detector_kinds()


@pytest.mark.usefixtures("registered")
def test_a_built_in_kind_cannot_be_replaced_from_outside(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.json"):
        build_detector("probe", tmp_path / "x.json")


def test_an_unknown_kind_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UnknownDetectorError, match=r"'prob'.*attention_tracker, combination.*tool_call_risk"):
        build_detector("prob", tmp_path / "x.json")
