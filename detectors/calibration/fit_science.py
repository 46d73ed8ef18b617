"""Fits the classifier of claims against references: softmax regression on normed states, its C chosen on validation
rows. The states are those of ``ScienceHallucination``'s own conversation, after the model's final norm."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.metrics import log_loss, roc_auc_score  # type: ignore[import-untyped]

from detectors.calibration.logistic import Matrix
from detectors.calibration.metrics import Labels
from detectors.science_hallucination import BIAS, GAIN, WEIGHT, Params, Vector
from detectors.science_prompt import LABELS, PROMPT_SHA256

REGULARISATIONS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class FittedScience:
    """weight: ``[3, hidden_size]``, bias: ``[3]``, on normed states as they are."""

    weight: Vector
    bias: Vector
    choices: dict[str, str]

    def probabilities(self, normed: npt.NDArray[np.float64]) -> Vector:
        """``[rows, 3]``, in the order of ``LABELS``."""
        logits = normed @ self.weight.T + self.bias
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def fit_science(train: Matrix, train_labels: Labels, validation: Matrix, labels: Labels) -> FittedScience:
    """train, validation: ``[rows, hidden_size]`` normed states; labels: indices into ``LABELS``, of which every one
    occurs. The C with the lowest loss on validation rows."""
    every = np.arange(len(LABELS))
    if set(train_labels.tolist()) != set(every.tolist()):
        raise ValueError(f"training rows need all labels: {', '.join(LABELS)}")
    tried = [_fit(train, train_labels, c) for c in REGULARISATIONS]
    losses = [float(log_loss(labels, one.probabilities(validation), labels=every)) for one in tried]
    at = int(np.argmin(losses))
    best = tried[at]
    auroc = roc_auc_score(labels != 0, 1 - best.probabilities(validation)[:, 0])
    return FittedScience(
        best.weight,
        best.bias,
        {
            "regularisation": f"loss on validation rows: C={REGULARISATIONS[at]:g} {losses[at]:.3f}; "
            f"AUROC of not entailed there {auroc:.3f}"
        },
    )


def _fit(x: Matrix, labels: Labels, c: float) -> FittedScience:
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    model = LogisticRegression(C=c, class_weight="balanced", max_iter=2000).fit((x - mean) / scale, labels)
    weight = model.coef_ / scale
    return FittedScience(weight, model.intercept_ - weight @ mean, {})


def science_files(
    fitted: FittedScience, norm_gain: npt.ArrayLike, norm_eps: float, layer: int, config_key: str
) -> tuple[Params, bytes]:
    """What the JSON says, and the bytes of the weights' file. norm_gain: ``[hidden_size]``, the model's final norm."""
    raw = save(
        {
            # What scikit-learn leaves may lie in columns, which safetensors would write as rows.
            WEIGHT: np.ascontiguousarray(fitted.weight, np.float32),
            BIAS: fitted.bias.astype(np.float32),
            GAIN: np.asarray(norm_gain, np.float32),
        },
        metadata={"model": config_key},
    )
    params = Params(
        layer=layer,
        hidden_size=fitted.weight.shape[1],
        norm_eps=norm_eps,
        prompt_sha256=PROMPT_SHA256,
        weights=f"{config_key}.safetensors",
        weights_sha256=hashlib.sha256(raw).hexdigest(),
    )
    return params, raw
