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
        (float(roc_auc_score(labels, classifier.decision_function(seen))), vectorizer, classifier)
        for vectorizer in (
            TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
            TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True),
        )
        for counted, seen in [(vectorizer.fit_transform(train), vectorizer.transform(validation))]
        for classifier in [_classifier(regularisation).fit(counted, train_labels) for regularisation in REGULARISATIONS]
    ]
    _, vectorizer, classifier = max(fitted, key=lambda one: one[0])
    return make_pipeline(vectorizer, classifier)


def baseline_scores(model: Pipeline, texts: Sequence[str]) -> Scores:
    return np.asarray(model.decision_function(texts))


def _classifier(regularisation: float) -> LogisticRegression:
    # Of the solvers the quickest for few rows with very many columns.
    return LogisticRegression(C=regularisation, class_weight="balanced", solver="liblinear", max_iter=2000)
