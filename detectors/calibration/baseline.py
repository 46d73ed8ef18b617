"""What reading the text alone gives: TF-IDF with logistic regression, on the same rows, so that reports can compare.

Owns a baseline that is meant to be hard to beat: its variant is chosen on validation rows, as the probe's layers are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]
from sklearn.pipeline import Pipeline, make_pipeline  # type: ignore[import-untyped]

from detectors.calibration.metrics import Labels, Scores

REGULARISATIONS = (1.0, 10.0, 100.0)


def fit_baseline(train: Sequence[str], train_labels: Labels, validation: Sequence[str], labels: Labels) -> Pipeline:
    """The variant (words or characters, C) with the best AUROC on validation rows, fitted on training rows."""
    fitted = [
        _pipeline(kind, regularisation).fit(train, train_labels)
        for kind in ("words", "characters")
        for regularisation in REGULARISATIONS
    ]
    return max(fitted, key=lambda model: float(roc_auc_score(labels, baseline_scores(model, validation))))


def baseline_scores(model: Pipeline, texts: Sequence[str]) -> Scores:
    return np.asarray(model.decision_function(texts))


def _pipeline(kind: str, regularisation: float) -> Pipeline:
    vectorizer = (
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
        if kind == "words"
        else TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    )
    return make_pipeline(vectorizer, LogisticRegression(C=regularisation, class_weight="balanced", max_iter=2000))
