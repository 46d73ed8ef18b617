"""From the model's states on both sides of contrast pairs to one vector for each layer. Owns the two formulas.

Pure: no engine, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from guard.mia.results import FloatArray

Method = Literal["diff", "pca"]
_Doubles = npt.NDArray[np.float64]
FOLDS = 5


@dataclass(frozen=True)
class Learnt:
    """One layer's vector. With coefficient 1 it moves a state as far as the positive sides lie from the negative ones.

    vector: ``[hidden_size]``. stream_norm: mean length of the states it was learnt from, so that its own length shows
    how strong it is. held_out: share of pairs whose difference points its way when it is learnt without them; 0.5 is
    chance.
    """

    layer: int
    vector: FloatArray
    stream_norm: float
    held_out: float

    @property
    def norm(self) -> float:
        return float(np.linalg.norm(self.vector))


def difference_of_means(differences: _Doubles) -> _Doubles:
    """The mean of the pairs' differences, which is the difference of the sides' means ("contrastive activation
    addition", arXiv 2312.06681). differences: ``[pairs, hidden_size]``."""
    mean: _Doubles = differences.mean(axis=0)
    return mean


def principal_direction(differences: _Doubles) -> _Doubles:
    """First principal direction of the pairs' differences, as long as their mean is along it, and pointing its way.

    Not centred: centring would take out the very difference of the sides. Representation engineering (arXiv 2310.01405)
    gets the same direction by turning every second difference round before it centres. differences:
    ``[pairs, hidden_size]``.
    """
    unit = np.linalg.svd(differences, full_matrices=False)[2][0]
    along: _Doubles = unit * (differences.mean(axis=0) @ unit)
    return along


METHODS: Mapping[Method, Callable[[_Doubles], _Doubles]] = {"diff": difference_of_means, "pca": principal_direction}


class LearningError(ValueError):
    """The pairs teach nothing at a layer; the message says which."""


def learn(positive: FloatArray, negative: FloatArray, layers: Sequence[int], method: Method) -> list[Learnt]:
    """One vector for each of ``layers``. Both sides: ``[pairs, layers, hidden_size]``. Raises ``LearningError``."""
    formula = METHODS[method]
    found = []
    for i, layer in enumerate(layers):
        sides = np.asarray(positive[:, i], np.float64), np.asarray(negative[:, i], np.float64)
        differences = sides[0] - sides[1]
        vector = formula(differences).astype(np.float32)
        if not vector.any():
            raise LearningError(f"at layer {layer} both sides of the pairs are the same to the model")
        stream_norm = float(np.linalg.norm(np.concatenate(sides), axis=-1).mean())
        found.append(Learnt(layer, vector, stream_norm, _held_out(differences, formula)))
    return found


def _held_out(differences: _Doubles, formula: Callable[[_Doubles], _Doubles]) -> float:
    fold = np.arange(len(differences)) % min(FOLDS, len(differences))
    agree = [differences[fold == k] @ formula(differences[fold != k]) > 0 for k in np.unique(fold)]
    return float(np.concatenate(agree).mean())
