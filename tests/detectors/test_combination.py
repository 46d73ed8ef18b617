"""The combination against scikit-learn, and what it makes of scores that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from detectors.base import Score
from detectors.calibration.fit_combination import fit_combination
from detectors.combination import Combination, CombinationConfig
from detectors.model_config import ModelInfo
from tests.detectors.weights import build


def combination(folder: Path, **changes: Any) -> Combination:
    inputs = {"probe": {"weight": 2.0}, "text_baseline": {"weight": 1.0, "transform": "identity"} | changes}
    made: Combination = build(folder, "combination", inputs=inputs, bias=-1.0)
    return made


def scored(value: float) -> Score:
    return Score("scored", value)


def test_is_the_logistic_of_the_weighted_sum(tmp_path: Path) -> None:
    score = combination(tmp_path).score_from({"probe": scored(0.8), "text_baseline": scored(0.3)})
    assert score.value == pytest.approx(1 / (1 + np.exp(-(2 * np.log(0.8 / 0.2) + 0.3 - 1))))
    assert score.reason == ""


def test_certain_scores_do_not_make_infinite_ones(tmp_path: Path) -> None:
    values = [
        combination(tmp_path).score_from({"probe": scored(p), "text_baseline": scored(0)}).value for p in (0.0, 1.0)
    ]
    assert values == pytest.approx([0.0, 1.0], abs=1e-9)


def test_a_missing_score_makes_it_unavailable_and_is_named(tmp_path: Path) -> None:
    late = Score("unavailable", reason="late", timed_out=True)
    score = combination(tmp_path).score_from({"probe": scored(0.8), "text_baseline": late})
    assert (score.status, score.value, score.timed_out) == ("unavailable", None, True)
    assert score.reason == "text_baseline: late"
    both = combination(tmp_path).score_from({"probe": Score("unavailable", reason="dropped"), "text_baseline": late})
    assert not both.timed_out, "one of them is missing for another reason"
    assert combination(tmp_path).score_from({}).status == "unavailable"


def test_a_missing_score_is_replaced_where_the_file_says_so_and_the_result_tells(tmp_path: Path) -> None:
    detector = combination(tmp_path, when_missing=0.1)
    replaced = detector.score_from({"probe": scored(0.8), "text_baseline": Score("not_applicable")})
    assert replaced.value == detector.score_from({"probe": scored(0.8), "text_baseline": scored(0.1)}).value
    assert replaced.reason == "text_baseline has no score and is taken as 0.1"


def test_a_fitted_one_weighs_scores_as_scikit_learn_does() -> None:
    generator = np.random.default_rng(1)
    labels = np.repeat([0, 1], 200)
    good = np.clip(1 / (1 + np.exp(-(labels * 3 - 1.5 + generator.normal(size=400)))), 0.001, 0.999)
    noise = generator.uniform(0.1, 0.9, size=400)
    params = fit_combination({"probe": good, "text_baseline": noise}, labels, {"text_baseline": 0.5})
    detector = Combination(CombinationConfig(model_info=ModelInfo(name="tiny"), params=params))
    x = np.stack([np.log(p / (1 - p)) for p in (good, noise)], axis=1)
    mean, scale = x.mean(axis=0), x.std(axis=0)
    model = LogisticRegression(class_weight="balanced").fit((x - mean) / scale, labels)
    expected = model.predict_proba((x - mean) / scale)[:, 1]
    values = [
        detector.score_from({"probe": scored(a), "text_baseline": scored(b)}).value
        for a, b in zip(good, noise, strict=True)
    ]
    assert values == pytest.approx(expected.tolist(), abs=1e-6)
    assert params.inputs["probe"].weight > 5 * abs(params.inputs["text_baseline"].weight)
    assert (params.inputs["probe"].when_missing, params.inputs["text_baseline"].when_missing) == (None, 0.5)
