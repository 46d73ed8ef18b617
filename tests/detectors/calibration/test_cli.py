"""``guard calibrate`` refuses what it cannot do before any engine starts."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from detectors.calibration.cli import calibrate

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
