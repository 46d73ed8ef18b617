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
from detectors.h_node import HNode
from detectors.probe import Probe
from guard.data import data_folder
from guard.policy import load_policy
from guard.policy.bound import bind, build_detectors

app = typer.Typer()
app.command()(calibrate)


FILE = Probe.load(data_folder("model_configs") / "probe" / "SmolLM2-135M-Instruct.json").config.fingerprint
PROBE = f"probe@0123456789ab+{FILE}"


def line(score: float | None, measured: str = PROBE, name: str = "injection") -> dict[str, Any]:
    return {"request_id": "r", "scores": {name: score}, "measured": {name: measured}}


def spread(count: int, low: float, high: float, measured: str = PROBE) -> list[dict[str, Any]]:
    return [line(float(one), measured) for one in np.random.default_rng(1).permutation(np.linspace(low, high, count))]


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
    lines = [line(0.99, f"probe@ba9876543210+{FILE}")] + [line(float(score)) for score in scores] + [line(None)]
    outcome = run(config, ledger_of(config, lines))
    assert outcome.exit_code == 0, outcome.output
    assert "2 other lines" in outcome.output
    assert f"left out, measured otherwise: probe@ba9876543210+{FILE} (1)" in outcome.output
    assert "a ledger has no texts" in outcome.output
    assert "fpr_0_1pct: left as it was, it needs 3000" in outcome.output
    after = Probe.load(config)
    for name, budget in (("fpr_1pct", 0.01), ("fpr_5pct", 0.05)):
        assert np.mean(scores[:600] >= after.thresholds[name]) <= budget
        assert after.thresholds[name] == pytest.approx(0.4 * (1 - budget), abs=0.02)
    assert after.thresholds["balanced"] == before.thresholds["balanced"]
    assert after.config.calibration is not None
    point = after.config.calibration.thresholds["fpr_5pct"]
    assert (point.validation_benign, point.held_out_benign) == (600, 300)
    assert point.scores_of == FILE
    assert after.config.calibration.thresholds["balanced"].scores_of == ""
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
    assert f"900 scores of injection ({PROBE}, 900 of answers); 101 other lines" in outcome.output
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


@pytest.mark.parametrize(
    "measured",
    ["attention_tracker@bbbbbbbbbbbb+000000000000", "probe@aaaaaaaaaaaa", "probe@aaaaaaaaaaaa+000000000000", "unknown"],
)
def test_scores_that_another_detector_or_calibration_gave_set_nothing(config: Path, measured: str) -> None:
    before = config.read_bytes()
    outcome = run(config, ledger_of(config, spread(900, 0.1, 0.9, measured)))
    assert outcome.exit_code == 1
    assert f"{measured} (900)" in outcome.output
    assert f"+{FILE}" in outcome.output
    assert config.read_bytes() == before


def test_scores_from_before_a_refit_are_left_out_and_counted(config: Path) -> None:
    before = spread(1000, 0.8, 0.99, "probe@0123456789ab+000000000000")
    outcome = run(config, ledger_of(config, [*before, *spread(900, 0.0, 0.4), *before[:1]]))
    assert outcome.exit_code == 0, outcome.output
    assert "900 scores" in outcome.output
    assert "probe@0123456789ab+000000000000 (1001)" in outcome.output
    assert max(Probe.load(config).thresholds[name] for name in ("fpr_1pct", "fpr_5pct")) < 0.4


def test_a_file_of_another_kind_than_the_scores_is_named(config: Path) -> None:
    tracker = data_folder("model_configs") / "attention_tracker" / "SmolLM2-135M-Instruct.json"
    folder = config.parent / "attention_tracker"
    folder.mkdir()
    copy = Path(shutil.copy(tracker, folder))
    outcome = run(copy, ledger_of(config, spread(900, 0.0, 0.4)))
    assert outcome.exit_code == 1
    assert "attention_tracker@" in outcome.output
    assert PROBE in outcome.output
    assert copy.read_bytes() == tracker.read_bytes()


def test_the_proxy_writes_what_the_command_compares(config: Path, tmp_path: Path) -> None:
    loaded = load_policy(data_folder("policies") / "observe.yaml")
    bound = bind(loaded, build_detectors(loaded, "SmolLM2-135M-Instruct", data_folder("model_configs")))
    lines = spread(900, 0.0, 0.4, bound.digests["injection"])
    outcome = run(config, ledger_of(config, lines))
    assert outcome.exit_code == 0, outcome.output
    # New thresholds give the same scores.
    assert Probe.load(config).config.fingerprint == FILE


def test_thresholds_that_no_policy_could_use_are_refused(config: Path) -> None:
    before = config.read_bytes()
    outcome = run(config, ledger_of(config, spread(120, 0.95, 0.99)))
    assert outcome.exit_code == 1
    assert "fpr_5pct 0.98" in outcome.output
    assert "at least 450 scores" in outcome.output
    same = run(config, ledger_of(config, [line(0.5)] * 900))
    assert same.exit_code == 1
    assert "too many scores are the same" in same.output
    assert config.read_bytes() == before
    assert not list(config.parent.glob("*partial*"))


def test_a_threshold_that_no_score_reaches_is_refused(config: Path) -> None:
    before = config.read_bytes()
    outcome = run(config, ledger_of(config, [line(1.0)] * 900))
    assert outcome.exit_code == 1
    assert "no threshold separates: 600 of 600 scores are 1" in outcome.output
    assert config.read_bytes() == before


def test_a_detector_of_answers_has_thresholds_from_the_answers_of_a_ledger(config: Path) -> None:
    folder = config.parent / "h_node"
    folder.mkdir()
    for suffix in ("json", "safetensors"):
        shutil.copy(data_folder("model_configs") / "h_node" / f"SmolLM2-135M-Instruct.{suffix}", folder)
    facts = folder / config.name
    measured = f"h_node@cccccccccccc+{HNode.load(facts).config.fingerprint}"
    lines = [
        {
            "request_id": "r",
            "scores": {},
            "measured": {},
            "answer": {"scores": one["scores"], "measured": {"facts": measured}},
        }
        for one in (line(float(score), name="facts") for score in np.linspace(0.0, 0.4, 900))
    ]
    ledger = ledger_of(config, [*lines, {"request_id": "r", "scores": {}, "measured": {}, "answer": None}])
    outcome = run(facts, ledger, "--detector", "facts")
    assert outcome.exit_code == 0, outcome.output
    assert "900 of answers" in outcome.output
    assert HNode.load(facts).thresholds["fpr_5pct"] < 0.4


def test_of_a_request_that_is_scored_twice_the_higher_score_counts(config: Path) -> None:
    both = [
        one | {"answer": {"scores": {"injection": 0.6}, "measured": {"injection": PROBE}}}
        for one in spread(900, 0.0, 0.9)
    ]
    outcome = run(config, ledger_of(config, both), "--budget", "0.05")
    assert outcome.exit_code == 0, outcome.output
    assert "900 scores" in outcome.output
    assert Probe.load(config).thresholds["fpr_5pct"] == pytest.approx(0.855, abs=0.03)


def test_scores_that_are_no_finite_numbers_are_other_lines(config: Path) -> None:
    scores = np.random.default_rng(0).uniform(0.0, 0.4, 900)
    lines = [line(float("nan")), *(line(float(score)) for score in scores), line(float("inf")), line(-float("inf"))]
    lines.append({**line(0.1), "scores": {"injection": 10**400}})
    outcome = run(config, ledger_of(config, lines), "--budget", "0.05")
    assert outcome.exit_code == 0, outcome.output
    assert "900 scores of injection" in outcome.output


def test_scores_that_may_be_higher_than_they_are_set_nothing(config: Path) -> None:
    """As of a prompt whose windows were not all read."""
    low = {**line(0.001), "detectors": {"injection": "scored: not all windows were read in time"}}
    whole = [{**one, "detectors": {"injection": "scored"}} for one in spread(900, 0.2, 0.4)]
    outcome = run(config, ledger_of(config, [low] * 900 + whole))
    assert outcome.exit_code == 0, outcome.output
    assert "900 scores of injection" in outcome.output
    assert "901 other lines" in outcome.output
    assert Probe.load(config).thresholds["fpr_1pct"] == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("content", ["[1]", "[" * 100_000, "\xff"])
def test_a_detectors_file_that_is_none_is_one_line(config: Path, content: str) -> None:
    ledger = ledger_of(config, [line(0.1)])
    config.write_bytes(content.encode("latin-1"))
    outcome = run(config, ledger)
    assert (outcome.exit_code, outcome.output.count("\n")) == (1, 1)
    assert str(config) in outcome.output
