"""Files in model_configs: those we ship load, and a wrong one is refused by file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from detectors.attention_tracker import AttentionTrackerConfig
from detectors.model_config import ModelConfigError, load_model_config
from detectors.registry import BUILT_IN, build_detector

SHIPPED = Path(__file__).parents[2] / "model_configs"
FILES = [(kind, path) for kind in BUILT_IN for path in sorted((SHIPPED / kind).glob("*.json"))]


def valid() -> dict[str, Any]:
    return {"model_info": {"name": "tiny"}, "params": {"important_heads": [[0, 1]]}}


def test_the_default_model_has_a_file_for_every_built_in_kind() -> None:
    assert {kind for kind, path in FILES if path.stem == "SmolLM2-135M-Instruct"} == BUILT_IN.keys()


@pytest.mark.parametrize(("kind", "path"), FILES, ids=[f"{kind}/{path.stem}" for kind, path in FILES])
def test_every_shipped_file_builds_its_detector_with_ordered_thresholds(kind: str, path: Path) -> None:
    detector = build_detector(kind, path)
    assert detector.kind == kind
    assert detector.thresholds["fpr_5pct"] <= detector.thresholds["fpr_1pct"] < 1
    plan = detector.plan()
    assert plan.hidden or plan.attention


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"params": {"important_heads": []}}, "params.important_heads"),
        ({"params": {"important_heads": [[0, -1]]}}, "params.important_heads.0.1"),
        ({"params": {"important_heads": [[0, 1]], "temperture": 1}}, "params.temperture"),
        ({"model_info": {}}, "model_info.name"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(valid() | change))
    with pytest.raises(ModelConfigError, match=rf"tiny\.json: {field}: "):
        load_model_config(path, AttentionTrackerConfig)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text("{")
    with pytest.raises(ModelConfigError, match=r"tiny\.json: "):
        load_model_config(path, AttentionTrackerConfig)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="guard calibrate"):
        load_model_config(tmp_path / "none.json", AttentionTrackerConfig)
