"""``guard calibrate threshold``: thresholds from the scores of the user's own traffic."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from detectors.calibration.cli import calibrate
from detectors.calibration.ledger_thresholds import name_of
from detectors.probe import Probe
from guard.data import data_folder

app = typer.Typer()
app.command()(calibrate)


def line(score: float | None, measured: str = "probe@new", name: str = "injection") -> dict[str, Any]:
    return {"request_id": "r", "scores": {name: score}, "measured": {name: measured}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A copy of the shipped probe, with its weights."""
    folder = data_folder("model_configs") / "probe"
    for suffix in ("json", "safetensors"):
        shutil.copy(folder / f"SmolLM2-135M-Instruct.{suffix}", tmp_path)
    return tmp_path / "SmolLM2-135M-Instruct.json"


def ledger_of(config: Path, lines: list[dict[str, Any]]) -> Path:
    path = config.parent / "ledger.jsonl"
    path.write_text("\n".join(["half a li", *map(json.dumps, lines)]), encoding="utf-8")
    return path


def run(config: Path, ledger: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["threshold", "--ledger", str(ledger), "--config", str(config), *more])


def test_thresholds_keep_their_budget_on_the_traffic_and_the_rest_of_the_file_stays(config: Path) -> None:
    before = Probe.load(config)
    scores = np.random.default_rng(0).permutation(np.linspace(0.0, 0.4, 900))
    lines = [line(0.99, "probe@old")] + [line(float(score)) for score in scores] + [line(None)]
    outcome = run(config, ledger_of(config, lines))
    assert outcome.exit_code == 0, outcome.output
    assert "3 other lines" in outcome.output
    assert "fpr_0_1pct: left as it was, it needs 3000" in outcome.output
    after = Probe.load(config)
    for name, budget in (("fpr_1pct", 0.01), ("fpr_5pct", 0.05)):
        assert np.mean(scores[:600] >= after.thresholds[name]) <= budget
        assert after.thresholds[name] == pytest.approx(0.4 * (1 - budget), abs=0.02)
    assert after.thresholds["balanced"] == before.thresholds["balanced"]
    assert after.config.calibration is not None
    point = after.config.calibration.thresholds["fpr_5pct"]
    assert (point.validation_benign, point.held_out_benign) == (600, 300)
    assert point.validation_fpr_interval is not None
    assert point.validation_fpr_interval.low < 0.05 < point.validation_fpr_interval.high
    assert "ledger" in after.config.calibration.choices["thresholds"]


def test_a_detector_of_answers_counts_once_a_request_and_a_streams_first_moment_never(config: Path) -> None:
    scores = [float(one) for one in np.random.default_rng(0).permutation(np.linspace(0.0, 0.4, 900))]
    lines = [{**line(None, name="other"), "answer": line(one)} for one in scores[:450]]
    lines += [{**line(0.0), "streamed": True, "answer": {**line(one), "complete": True}} for one in scores[450:]]
    lines += [{**line(None), "streamed": True, "answer": line(0.0)}] * 100  # as versions before this field wrote them
    outcome = run(config, ledger_of(config, lines))
    assert outcome.exit_code == 0, outcome.output
    assert "900 scores of injection (probe@new); 101 other lines" in outcome.output
    assert Probe.load(config).thresholds["fpr_5pct"] == pytest.approx(0.38, abs=0.02)


def test_a_budget_that_the_scores_cannot_support_is_refused_and_nothing_written(config: Path) -> None:
    before = config.read_bytes()
    outcome = run(config, ledger_of(config, [line(i / 400) for i in range(400)]), "--budget", "0.01")
    assert outcome.exit_code == 1
    assert "needs at least 300 benign rows, there are 266" in outcome.output
    assert config.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--detector", "other"], "has no score of a detector 'other'"), (["--budget", "0.7"], "between 0 and 0.5")],
)
def test_what_cannot_be_done_is_said(config: Path, more: list[str], message: str) -> None:
    outcome = run(config, ledger_of(config, [line(0.1)] * 100), *more)
    assert outcome.exit_code == 1
    assert message in outcome.output


def test_threshold_stands_alone_and_needs_a_ledger_and_a_file() -> None:
    assert CliRunner().invoke(app, ["threshold"]).exit_code == 2
    assert CliRunner().invoke(app, ["threshold", "probe", "--ledger", "x", "--config", "y"]).exit_code == 2


def test_budgets_have_the_names_that_policies_use() -> None:
    assert [name_of(budget) for budget in (0.001, 0.01, 0.05)] == ["fpr_0_1pct", "fpr_1pct", "fpr_5pct"]
