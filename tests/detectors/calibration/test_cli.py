"""``guard calibrate`` refuses what it cannot do before any engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from detectors.calibration.cli import Kind, calibrate
from detectors.calibration.given_options import USED_BY

app = typer.Typer()
app.command()(calibrate)


def test_a_model_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["probe", "--model", str(tmp_path), "--out", str(tmp_path / "out")])
    assert outcome.exit_code == 1
    assert "guard model pull" in outcome.output
    assert not (tmp_path / "out").exists()


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    outcome = CliRunner().invoke(app, ["prob"])
    assert outcome.exit_code == 2
    assert "attention_tracker" in outcome.output


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ["text_baseline", "--pooling", "max"],
            "--pooling is for probe, combination, and says nothing for text_baseline",
        ),
        (["attention_tracker", "tool_call_risk", "--pooling", "best"], "--pooling is for probe, combination"),
        (["text_baseline", "--url", "http://localhost:1/v1"], "--url is for attention_tracker, probe"),
        (["steering", "--url", "http://localhost:1/v1"], "and says nothing for steering"),
        (["h_node", "--data", "own"], "--data is for attention_tracker, probe"),
        (["probe", "--force"], "--force is for steering"),
        (
            ["probe", "--config", "x.json", "--budget", "0.02"],
            "--config is for threshold, and says nothing for probe; --b",
        ),
        (["--ledger", "x.jsonl"], "--ledger is for threshold, and says nothing for attention_tracker, probe,"),
        (["threshold", "--seed", "3", "--ledger", "x", "--config", "y"], "and says nothing for threshold"),
        (["threshold", "--model", "other", "--ledger", "x", "--config", "y"], "--model is for attention_tracker"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(given: list[str], told: str) -> None:
    outcome = CliRunner().invoke(app, given)
    assert outcome.exit_code == 2
    assert told in outcome.output


def test_every_option_says_for_which_kinds_it_is() -> None:
    options = {one.name for one in typer.main.get_command(app).params} - {"kinds", "help"}
    # Completion is typer's own.
    own = {name for name in options if name and "completion" not in name}
    assert own == USED_BY.keys()
    assert {kind for kinds in USED_BY.values() for kind in kinds} == set(Kind)


@pytest.mark.parametrize(
    "given", [["text_baseline", "--pooling", "last_token"], ["h_node", "--data", "all", "--seed", "0"]]
)
def test_a_default_that_is_spelt_out_is_accepted(tmp_path: Path, given: list[str]) -> None:
    outcome = CliRunner().invoke(app, [*given, "--model", str(tmp_path)])
    assert "guard model pull" in outcome.output  # only then the model is looked for
