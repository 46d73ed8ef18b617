"""Files in model_configs: those we ship load, and a wrong one is refused by file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from detectors.attention_tracker import AttentionTrackerConfig
from detectors.base import ScoreDetector, SecondPassDetector, TextDetector
from detectors.engine_probes import plan_of
from detectors.model_config import ModelConfigError, load_model_config
from detectors.registry import BUILT_IN, build_detector

SHIPPED = Path(__file__).parents[2] / "model_configs"
FILES = [
    (kind, path)
    for kind in BUILT_IN
    for path in sorted((SHIPPED / kind).glob("*.json"))
    if not path.name.endswith(".vocabulary.json")
]
MEASURED = [(kind, path) for kind, path in FILES if path.stem.startswith("SmolLM2-135M-Instruct")]
PUBLISHED = [path for _, path in FILES if not path.stem.startswith("SmolLM2-135M-Instruct")]


def valid() -> dict[str, Any]:
    return {"model_info": {"name": "tiny"}, "params": {"important_heads": [[0, 1]]}}


def test_the_default_model_has_a_file_for_the_kinds_that_the_default_policies_use() -> None:
    assert {kind for kind, _ in MEASURED} >= {"probe", "attention_tracker"}


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_figures_that_others_published_name_them_and_how_to_measure_and_loading_them_warns(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    detector = build_detector(path.parent.name, path)
    assert detector.thresholds == {}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "vLLM-Hook" in record.message
    assert f"guard calibrate attention_tracker --model /path/to/{path.stem}" in record.message


def test_heads_that_others_published_are_theirs() -> None:
    counts = {path.stem: len(json.loads(path.read_text())["params"]["important_heads"]) for path in PUBLISHED}
    assert counts == {
        "Qwen2-1.5B-Instruct": 14,
        "Meta-Llama-3-8B-Instruct": 4,
        "Mistral-7B-Instruct-v0.3": 25,
        "granite-3.1-8b-instruct": 41,
    }


def test_unverified_figures_without_an_author_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(valid() | {"verified": False}))
    with pytest.raises(ModelConfigError, match="figures that are not verified have published"):
        load_model_config(path, AttentionTrackerConfig)


@pytest.mark.parametrize(("kind", "path"), MEASURED, ids=[kind for kind, _ in MEASURED])
def test_every_shipped_file_builds_its_detector_with_ordered_thresholds(kind: str, path: Path) -> None:
    detector = build_detector(kind, path)
    assert detector.kind == kind
    # Few rows support no small budget; every shipped file has the largest.
    ordered = [
        detector.thresholds[name] for name in ("fpr_5pct", "fpr_1pct", "fpr_0_1pct") if name in detector.thresholds
    ]
    assert ordered[0] == detector.thresholds["fpr_5pct"]
    assert ordered == sorted(ordered)
    assert ordered[-1] < 1
    if not isinstance(detector, TextDetector | ScoreDetector | SecondPassDetector):
        plan = plan_of(detector)
        assert plan.hidden or plan.attention or plan.probes


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
