"""What reading the text alone gives: TF-IDF with logistic regression, on the same rows, so that reports can compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]
from sklearn.model_selection import StratifiedGroupKFold  # type: ignore[import-untyped]
from sklearn.pipeline import Pipeline, make_pipeline  # type: ignore[import-untyped]

from detectors.calibration.metrics import Labels, Scores

REGULARISATIONS = (1.0, 10.0, 100.0)
FOLDS = 5


def baseline_scores(
    train: Sequence[str], labels: Labels, groups: Sequence[str], texts: Sequence[str], seed: int
) -> Scores:
    """Scores of ``texts`` from the variant (words or characters, C) with the best out-of-fold AUROC on ``train``."""
    best = max(
        (_out_of_fold_auroc(kind, c, train, labels, groups, seed), kind, c)
        for kind in ("words", "characters")
        for c in REGULARISATIONS
    )
    return np.asarray(_pipeline(*best[1:]).fit(train, labels).decision_function(texts))


def _out_of_fold_auroc(
    kind: str, regularisation: float, texts: Sequence[str], labels: Labels, groups: Sequence[str], seed: int
) -> float:
    scores = np.zeros(len(texts))
    for seen, unseen in StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed).split(texts, labels, groups):
        model = _pipeline(kind, regularisation).fit([texts[i] for i in seen], labels[seen])
        scores[unseen] = model.decision_function([texts[i] for i in unseen])
    return float(roc_auc_score(labels, scores))


def _pipeline(kind: str, regularisation: float) -> Pipeline:
    vectorizer = (
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
        if kind == "words"
        else TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    )
    return make_pipeline(vectorizer, LogisticRegression(C=regularisation, class_weight="balanced", max_iter=2000))
