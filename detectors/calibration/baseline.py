"""What reading the text alone gives: TF-IDF with logistic regression, on the same rows, so that reports can compare.

Owns a baseline that is meant to be hard to beat: its variant is chosen on validation rows, as the probe's layers are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.base import clone  # type: ignore[import-untyped]
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]
from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict  # type: ignore[import-untyped]
from sklearn.pipeline import Pipeline, make_pipeline  # type: ignore[import-untyped]

from detectors.calibration.logistic import FOLDS
from detectors.calibration.metrics import Labels, Scores

REGULARISATIONS = (1.0, 10.0, 100.0)


def fit_baseline(train: Sequence[str], train_labels: Labels, validation: Sequence[str], labels: Labels) -> Pipeline:
    """The variant (words or characters, C) with the best AUROC on validation rows, then fitted to both, as the probe
    is."""
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
    both = np.concatenate([train_labels, labels])
    return make_pipeline(clone(vectorizer), clone(classifier)).fit([*train, *validation], both)


def unseen_scores(model: Pipeline, texts: Sequence[str], labels: Labels, groups: Sequence[str], seed: int) -> Scores:
    """Each text's score by a fit of the same variant that saw nothing of its group."""
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    found = cross_val_predict(clone(model), list(texts), labels, groups=groups, cv=folds, method="decision_function")
    return np.asarray(found)


def baseline_scores(model: Pipeline, texts: Sequence[str]) -> Scores:
    return np.asarray(model.decision_function(texts))


def variant(model: Pipeline) -> str:
    """What was chosen."""
    vectorizer, classifier = (step for _, step in model.steps)
    shortest, longest = vectorizer.ngram_range
    what = "words" if vectorizer.analyzer == "word" else "characters"
    return f"{shortest} to {longest} {what}, C={classifier.C:g}"


def _classifier(regularisation: float) -> LogisticRegression:
    # Of the solvers the quickest for few rows with very many columns.
    return LogisticRegression(C=regularisation, class_weight="balanced", solver="liblinear", max_iter=2000)
