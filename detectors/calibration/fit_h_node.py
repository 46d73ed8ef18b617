"""Chooses H-Node's layer and regularisation, fits the probe, and picks the H-Nodes with their baselines.

Validation rows choose, training rows fit. Nodes are the dimensions whose standardised weight is most in favour of a
made-up statement; a node's baseline is a high percentile of its values in true ones, so that its excess is what true
statements hardly have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

from detectors.calibration.logistic import Linear, Matrix, calibrate, fit, out_of_fold_logits
from detectors.calibration.metrics import Labels, Scores
from detectors.h_node import BASELINES, BIAS, INDICES, MEAN, SCALE, WEIGHT, HNodeWeights, Params

REGULARISATIONS = (1e-4, 1e-3, 1e-2, 1e-1)
NODES = 50
BASELINE_PERCENTILE = 90.0


@dataclass(frozen=True)
class Statements:
    """States by layer ``[rows, hidden_size]`` of the token at which a statement ends; labels 1 where it is made up.

    groups: rows that must not be divided, such as a true statement and its false twin.
    """

    states: Mapping[int, Matrix]
    labels: Labels
    groups: Sequence[str]


@dataclass(frozen=True)
class FittedHNode:
    layer: int
    weights: HNodeWeights
    linear: Linear
    choices: dict[str, str]

    def logits(self, states: Mapping[int, Matrix]) -> Scores:
        return self.linear.logits(states[self.layer])


def fit_h_node(train: Statements, validation: Statements, seed: int, nodes: int = NODES) -> FittedHNode:
    """The layer and C with the best AUROC on validation rows, calibrated on training rows out of fold."""
    tried = {
        (layer, c): float(roc_auc_score(validation.labels, fit(x, train.labels, c).logits(validation.states[layer])))
        for layer, x in train.states.items()
        for c in REGULARISATIONS
    }
    (layer, c), auroc = max(tried.items(), key=lambda one: one[1])
    x = train.states[layer]
    unseen = out_of_fold_logits(x, train.labels, train.groups, c, seed)
    linear = calibrate(fit(x, train.labels, c), unseen, train.labels).linear
    by_layer = {one: max(value for (of, _), value in tried.items() if of == one) for one in train.states}
    others = ", ".join(f"{one} {value:.3f}" for one, value in by_layer.items() if one != layer)
    return FittedHNode(
        layer,
        _with_nodes(linear, x, train.labels, nodes),
        linear,
        {
            "layer and regularisation": f"AUROC on validation rows: {layer} with C={c:g} {auroc:.3f}; "
            f"other layers: {others or 'none were read'}",
            "nodes": f"the {nodes} largest standardised weights above zero; baselines: percentile "
            f"{BASELINE_PERCENTILE:g} of true training rows",
        },
    )


def _with_nodes(linear: Linear, x: Matrix, labels: Labels, nodes: int) -> HNodeWeights:
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    standardised = linear.weight * scale
    order = np.argsort(-standardised, kind="stable")[:nodes]
    indices = np.sort(order[standardised[order] > 0]).astype(np.int64)
    baselines = np.percentile(x[labels == 0][:, indices], BASELINE_PERCENTILE, axis=0)
    return HNodeWeights(
        standardised.astype(np.float32),
        linear.bias + float(linear.weight @ mean),
        mean.astype(np.float32),
        scale.astype(np.float32),
        indices,
        np.asarray(baselines, np.float32),
    )


def h_node_files(fitted: FittedHNode, config_key: str, **params: object) -> tuple[Params, bytes]:
    """What the JSON says, with ``params`` beside it as its type has them, and the bytes of the weights' file."""
    one = fitted.weights
    raw = save(
        {
            WEIGHT: one.weight,
            BIAS: np.array([one.bias], np.float32),
            MEAN: one.mean,
            SCALE: one.scale,
            INDICES: one.indices,
            BASELINES: one.baselines,
        },
        metadata={"model": config_key},
    )
    given = {
        "layer": fitted.layer,
        "hidden_size": len(one.weight),
        "nodes": len(one.indices),
        "weights": f"{config_key}.safetensors",
        "weights_sha256": hashlib.sha256(raw).hexdigest(),
        **params,
    }
    return Params.model_validate(given), raw
