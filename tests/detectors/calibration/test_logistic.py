"""The folded logistic regression is the one that scikit-learn fits on standardised columns."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from detectors.calibration.logistic import calibrate, fit, out_of_fold_logits
from detectors.probe import sigmoid


def planted(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, rows)
    x = generator.normal(size=(rows, columns)) * generator.uniform(0.1, 50, columns) + 7
    x[:, 2] += 40 * labels
    return x, labels


@pytest.mark.parametrize("columns", [10, 400])
def test_equals_scaler_and_logistic_regression_with_few_and_with_many_columns(columns: int) -> None:
    x, labels = planted(120, columns)
    expected = make_pipeline(
        StandardScaler(), LogisticRegression(C=0.01, class_weight="balanced", tol=1e-10, max_iter=5000)
    ).fit(x, labels)
    assert fit(x, labels, 0.01).logits(x) == pytest.approx(expected.decision_function(x), abs=1e-4)


def test_a_constant_column_does_no_harm() -> None:
    x, labels = planted(80, 10)
    x[:, 5] = 3.0
    assert np.isfinite(fit(x, labels, 0.1).logits(x)).all()


def test_out_of_fold_logits_know_nothing_of_their_own_group() -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], 100)
    # Rows of a group are copies: a fit that saw one of them would know the label of all; nothing else is to be learnt.
    x = generator.normal(size=(20, 300))[np.repeat(np.arange(20), 10)]
    groups = [str(g) for g in np.repeat(np.arange(20), 10)]
    unseen = out_of_fold_logits(x, labels, groups, 1.0, seed=0)
    assert np.mean((unseen > 0) == labels) < 0.8
    assert np.mean((fit(x, labels, 1.0).logits(x) > 0) == labels) == 1.0


def test_calibration_makes_overconfident_logits_probabilities() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 4000)
    honest = (2 * labels - 1) + generator.normal(size=4000)  # the true log odds are twice this
    x = honest[:, None]
    scaled = calibrate(fit(x, labels, 1.0), 30 * honest, labels)
    assert scaled.linear.weight[0] / fit(x, labels, 1.0).weight[0] == pytest.approx(2 / 30, rel=0.1)
    assert scaled.scores(np.array([30.0])) == pytest.approx(30 * scaled.slope + scaled.offset)
    sure = sigmoid(30 * honest * 2 / 30)
    high = sure > 0.8
    assert labels[high].mean() == pytest.approx(sure[high].mean(), abs=0.03)
