"""Steering vectors: the contrast, what counts as declining or as a loop, and which trial wins."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from detectors.calibration.steering import Trial, choose, contrast, opens_declining

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
