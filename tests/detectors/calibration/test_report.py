"""The table in the documentation is the one that the recorded figures give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from detectors.attention_tracker import AttentionTrackerConfig
from detectors.calibration.report import BEGIN, END, EVALUATION, fresh, renew
from detectors.calibration.sets.catalogue import cards
from detectors.calibration.windows_report import FITTED
from detectors.model_config import load_model_config
from detectors.probe import ProbeConfig

ROOT = Path(__file__).parents[3]


def test_the_documents_table_is_not_stale() -> None:
    document = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    assert document == fresh(document, ROOT / "bench" / "results"), (
        "run: python -m detectors.calibration.report docs/detectors.md bench/results"
    )


def test_the_first_weakness_says_on_which_sets_the_probe_falls_short() -> None:
    document = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    first = document.partition("## Weaknesses first")[2].partition("\n- **")[2].partition("\n- **")[0]
    recorded = json.loads((ROOT / "bench" / "results" / EVALUATION).read_text(encoding="utf-8"))["detectors"]
    probe, text = (recorded[kind]["left_out"] for kind in ("probe", "text_baseline"))
    short, _, worse = first.partition("reading the text alone does better")
    below = {name for name in probe if probe[name]["auroc"] < 0.9}
    assert set(re.findall(r"`([a-z-]+)` \(", short)) == below
    assert all(f"`{name}` ({probe[name]['auroc']:.3f}" in short for name in below)
    assert all(f"{probe[name]['tpr_1pct']:.0%}".replace("%", " %") in short for name in below)
    assert set(re.findall(r"`([a-z-]+)`", worse)) == {n for n in probe if text[n]["auroc"] > probe[n]["auroc"]}
    assert len(probe) == 14


def test_the_recorded_evaluation_is_of_the_detectors_that_ship() -> None:
    recorded = json.loads((ROOT / "bench" / "results" / EVALUATION).read_text(encoding="utf-8"))
    for kind, schema in (("probe", ProbeConfig), ("attention_tracker", AttentionTrackerConfig)):
        path = ROOT / "model_configs" / kind / "SmolLM2-135M-Instruct.json"
        calibration = load_model_config(path, schema).calibration
        assert calibration is not None
        measured = recorded["detectors"][kind]
        assert measured["pooled"]["auroc"] == pytest.approx(calibration.quality.auroc, abs=1e-6)
        for name, point in calibration.thresholds.items():
            assert measured["thresholds"][name]["value"] == point.value
            assert measured["thresholds"][name]["caught"]["hits"] == point.held_out_true_positives


def test_the_recorded_windows_are_of_the_probe_that_ships_and_its_budgets_are_kept_on_documents() -> None:
    name = "SmolLM2-135M-Instruct-windows"
    recorded = json.loads((ROOT / "bench" / "results" / FITTED).read_text(encoding="utf-8"))
    config = load_model_config(ROOT / "model_configs" / "probe" / f"{name}.json", ProbeConfig)
    assert config.params.windows is not None
    assert config.calibration is not None
    for point, one in config.calibration.thresholds.items():
        assert recorded["about"]["named"][name]["thresholds"][point] == one.value
        for part in ("held_out", "positions"):
            assert (
                recorded["candidates"][f"with windows, as served: {name}"][part]["reach"][point]["value"] == one.value
            )
    set_on = config.calibration.parts["benign documents of packages that were fitted to, out of fold"]
    for point, budget in (("fpr_1pct", 0.01), ("fpr_5pct", 0.05)):
        assert set_on.hits[point] / set_on.rows <= budget


def test_the_page_of_data_sets_is_what_the_catalogue_says() -> None:
    page = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")
    assert cards() in page, "run: python -m detectors.calibration.sets.catalogue docs/datasets.md"


def test_only_what_is_between_the_markers_changes() -> None:
    assert renew(f"before {BEGIN}old{END} after", "new") == f"before {BEGIN}\nnew\n{END} after"


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        renew("nothing here", "table")
