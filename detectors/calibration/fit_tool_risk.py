"""Fits the tool-call probe: principal components and logistic regression, folded to plain weights; validation rows
choose the layer, how many components, and C."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

from detectors.calibration.fit_h_node import Statements
from detectors.calibration.logistic import Linear, Matrix, calibrate, fit
from detectors.calibration.metrics import Scores
from detectors.linear import BIAS, WEIGHT
from detectors.tool_call_risk import Params

COMPONENTS = (8, 16, 32, 64)
REGULARISATIONS = (1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class FittedToolRisk:
    layer: int
    linear: Linear
    choices: dict[str, str]

    def logits(self, states: Mapping[int, Matrix]) -> Scores:
        return self.linear.logits(states[self.layer])


def fit_tool_risk(train: Statements, validation: Statements) -> FittedToolRisk:
    """Rows are steps of agents, labelled 1 where the step that follows does what an injection wants."""
    tried: dict[tuple[int, int, float], float] = {}
    for layer, x in train.states.items():
        for components in (count for count in COMPONENTS if count < min(x.shape)):
            for c in REGULARISATIONS:
                logits = fit_on_components(x, train, components, c).logits(validation.states[layer])
                tried[layer, components, c] = float(roc_auc_score(validation.labels, logits))
    if not tried:
        raise ValueError(f"there are too few rows for {min(COMPONENTS)} components")
    (layer, components, c), auroc = max(tried.items(), key=lambda one: one[1])
    linear = fit_on_components(train.states[layer], train, components, c)
    # Platt scaling on rows that the fit has not seen.
    linear = calibrate(linear, linear.logits(validation.states[layer]), validation.labels).linear
    chosen = f"AUROC on validation rows: layer {layer}, {components} components, C={c:g}: {auroc:.3f}"
    return FittedToolRisk(layer, linear, {"layer, components and regularisation": chosen})


def fit_on_components(x: Matrix, train: Statements, components: int, c: float) -> Linear:
    """Logistic regression on the first principal components of standardised columns, folded to weights on ``x``."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    _, _, axes = np.linalg.svd((x - mean) / scale, full_matrices=False)
    axes = axes[:components]
    inner = fit(((x - mean) / scale) @ axes.T, train.labels, c)
    weight = (inner.weight @ axes) / scale
    return Linear(weight, float(inner.bias - mean @ weight))


def tool_risk_files(fitted: FittedToolRisk, config_key: str, **params: object) -> tuple[Params, bytes]:
    """What the JSON says, with ``params`` beside it as its type has them, and the bytes of the weights' file."""
    raw = save(
        {WEIGHT: fitted.linear.weight.astype(np.float32), BIAS: np.array([fitted.linear.bias], np.float32)},
        metadata={"model": config_key},
    )
    given = {
        "layers": (fitted.layer,),
        "hidden_size": len(fitted.linear.weight),
        "weights": f"{config_key}.safetensors",
        "weights_sha256": hashlib.sha256(raw).hexdigest(),
        **params,
    }
    return Params.model_validate(given), raw
