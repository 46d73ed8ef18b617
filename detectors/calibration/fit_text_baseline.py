"""The text baseline that ``baseline`` fits, as the plain files that the detector reads.

Owns leaving scikit-learn behind: vocabulary, inverse document frequencies and weights, the last calibrated to
probabilities.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from safetensors.numpy import save

from detectors.calibration.logistic import Linear, calibrate
from detectors.calibration.metrics import Labels, Scores
from detectors.linear import sigmoid
from detectors.text_baseline import BIAS, IDF, WEIGHT, Params


def unseen_probabilities(unseen: Scores, labels: Labels) -> Scores:
    """``unseen``, decision values, as what the detector would say: the same Platt scaling."""
    return np.asarray(sigmoid(calibrate(Linear(np.zeros(0), 0.0), unseen, labels).scores(unseen)))


ANALYZERS = {"word": "words", "char_wb": "characters"}


def text_baseline_files(
    pipeline: Any, unseen: Scores, labels: Labels, config_key: str, most_terms: int = 20_000
) -> tuple[Params, dict[str, bytes]]:
    """What the JSON says, and its files by name. pipeline: a fitted ``TfidfVectorizer`` and ``LogisticRegression``.

    unseen: its decision values on rows that it was not fitted to, with ``labels``, for Platt scaling. ``most_terms``:
    those with the largest weights are kept. That changes lengths, and so scores, a little: measure what is written.
    """
    vectorizer, model = pipeline.steps[0][1], pipeline.steps[1][1]
    terms, weight = vectorizer.get_feature_names_out(), model.coef_[0]
    kept = np.sort(np.argsort(-np.abs(weight), kind="stable")[:most_terms])
    scaled = calibrate(Linear(weight[kept], float(model.intercept_[0])), unseen, labels).linear
    vocabulary = json.dumps([str(term) for term in terms[kept]], ensure_ascii=False, indent=0).encode()
    raw = save(
        {
            IDF: vectorizer.idf_[kept].astype(np.float32),
            WEIGHT: scaled.weight.astype(np.float32),
            BIAS: np.array([scaled.bias], np.float32),
        },
        metadata={"model": config_key},
    )
    params = Params.model_validate(
        {
            "analyzer": ANALYZERS[vectorizer.analyzer],
            "ngrams": tuple(vectorizer.ngram_range),
            "terms": len(kept),
            "vocabulary": f"{config_key}.vocabulary.json",
            "vocabulary_sha256": hashlib.sha256(vocabulary).hexdigest(),
            "weights": f"{config_key}.safetensors",
            "weights_sha256": hashlib.sha256(raw).hexdigest(),
        }
    )
    return params, {f"{config_key}.vocabulary.json": vocabulary, f"{config_key}.safetensors": raw}
