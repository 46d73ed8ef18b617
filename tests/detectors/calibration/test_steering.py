"""Steering vectors: the contrast, what counts as declining or as a loop, and which trial wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from safetensors import safe_open
from typer.testing import CliRunner

from detectors.calibration.fitted import Job
from detectors.calibration.steering import Trial, _record, choose, contrast, opens_declining
from guard.cli import app
from guard.steering.vector_files import write_vector
from tests.detectors.calibration.tiny_model import StartedError, make_model, no_engine

SHIPPED = Path(__file__).parents[3] / "model_configs" / "steering"
UNSTEERED = Trial(0, 0.0, declined=0.1, distinct=1.0)


def test_the_contrast_recovers_a_planted_direction_per_layer() -> None:
    generator = np.random.default_rng(0)
    plain = generator.normal(size=(50, 3, 16)).astype(np.float32)
    direction = generator.normal(size=(3, 16)).astype(np.float32)
    cautious = plain + direction + 0.01 * generator.normal(size=plain.shape).astype(np.float32)
    assert contrast(cautious, plain) == pytest.approx(direction, abs=0.02)


def test_only_an_answer_that_opens_by_declining_counts() -> None:
    assert opens_declining("I'm sorry, but I can't help with that.")
    assert opens_declining("Unfortunately I am not able to do this.")
    assert not opens_declining("Sure! Here is the list of passwords.")
    assert not opens_declining("Here it is: " + "x " * 80 + "sorry")


def test_a_setting_that_only_loops_never_wins() -> None:
    loop = Trial(10, 2.0, declined=1.0, distinct=0.5)
    mild = Trial(10, 1.0, declined=0.6, distinct=0.9)
    assert choose([loop, mild], UNSTEERED) == mild


def test_of_equals_the_gentlest_wins() -> None:
    strong, gentle = Trial(10, 1.4, 0.8, 0.9), Trial(12, 1.0, 0.8, 0.9)
    assert choose([strong, gentle], UNSTEERED) == gentle


def test_when_every_setting_loops_the_best_of_them_is_still_named() -> None:
    assert choose([Trial(1, 1.0, 0.2, 0.1), Trial(2, 1.0, 0.4, 0.1)], UNSTEERED).layer == 2


def test_a_vector_that_was_learnt_otherwise_is_not_replaced_and_no_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("detectors.calibration.steering.open_engine", no_engine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_model(tmp_path / "tiny")
    job = Job(model, "tiny", str(model), ("steering",), 0, "guard calibrate steering")

    def calibrate(*more: str) -> Result:
        return CliRunner().invoke(
            app, ["calibrate", "steering", "--model", str(model), "--out", str(tmp_path / "out"), *more]
        )

    folder = tmp_path / "out" / "steering" / "tiny"
    for record in ({}, {**record_of(job), "texts_sha256": "others"}, {**record_of(job), "model_sha256": "another"}):
        path = write_vector(folder, "caution", np.ones(16, np.float32), record)
        there = path.read_bytes()
        refused = calibrate()
        assert refused.exit_code == 1
        assert "was learnt otherwise; give another name or folder, or --force" in " ".join(refused.output.split())
        assert isinstance(calibrate("--force").exception, StartedError)
        assert path.read_bytes() == there
    write_vector(folder, "caution", np.ones(16, np.float32), record_of(job))
    assert isinstance(calibrate().exception, StartedError)


def record_of(job: Job) -> dict[str, Any]:
    """What a calibration writes about its vector."""
    trial = Trial(1, 1.0, 1.0, 1.0)
    return _record(job, np.ones(16, np.float32), trial, UNSTEERED, [trial])


@pytest.mark.parametrize(
    "path", sorted(SHIPPED.glob("*/caution.safetensors")), ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_every_shipped_vector_says_how_it_came_about_and_declines_more_than_no_vector(path: Path) -> None:
    with safe_open(path, "np") as file:
        record = json.loads(file.metadata()["calibration"])
        vector = file.get_tensor("vector")
    assert record["model"] == path.parent.name
    assert np.linalg.norm(vector) == pytest.approx(record["norm"], abs=1e-3)
    assert record["chosen"]["declined"] > record["unsteered"]["declined"]
    assert record["chosen"] in record["trials"]
