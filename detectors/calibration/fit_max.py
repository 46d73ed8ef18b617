"""Fits a probe whose score is that of the highest token: multi-instance logistic regression.

That a conversation is an attack says that some token of its data shows it, not which; that it is benign says that none
does. Andrews, Tsochantaridis and Hofmann, "Support Vector Machines for Multiple-Instance Learning" (NIPS 2002,
"MI-SVM"), take turns: with weights, the highest token of each attack stands for it; with these tokens, new weights.
Here with logistic loss, begun from mean states. Benign conversations keep all tokens that ever were their highest,
each counting its share: with the last one alone a token that was just pushed down would be free to rise again. A fit
to means alone knows nothing of single tokens, of which the highest is an extreme.

How many rounds is chosen on validation rows, as layer and penalty are. Memory holds one conversation's tokens and the
highest ones; a round reads the files once, for all penalties together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from detectors.calibration.features import Features
from detectors.calibration.logistic import Index, Linear, Rotated, folds
from detectors.calibration.metrics import Labels, Scores
from detectors.calibration.probe_candidates import Candidate, Choice, LabelledRows, Shortlisted, candidate
from detectors.calibration.token_states import TokenStates
from guard.mia.results import FloatArray

ROUNDS = 4
SHORTLIST = 2
"""Each needs as many fits as there are folds, times rounds."""


def max_shortlist(
    train: LabelledRows, validation: LabelledRows, regularisations: Sequence[float], seed: int
) -> tuple[int, list[Shortlisted]]:
    """How many were tried on validation rows, and the best of them; single layers."""
    tried: list[Candidate] = []
    seen, checked = _states(train.features), _states(validation.features)
    for layer in seen.layers:
        for rounds, models in enumerate(fitted_in_turns(seen, train.labels, layer, regularisations, ROUNDS)):
            logits, _, _ = highest(checked, layer, models)
            tried += [
                candidate(Choice("max", (layer,)), regularisation, logits[:, i], validation.labels, rounds)
                for i, regularisation in enumerate(regularisations)
            ]
    best: dict[tuple[Choice, float], Candidate] = {}
    for one in sorted(tried, key=lambda c: -c.merit):
        # The same with more or fewer rounds is nearly the same probe.
        best.setdefault((one.choice, one.regularisation), one)
    labels = np.concatenate([train.labels, validation.labels])
    groups = [*train.groups, *validation.groups]
    return len(tried), [
        _out_of_fold(seen + checked, labels, groups, one, seed) for one in list(best.values())[:SHORTLIST]
    ]


def max_logits(features: Features, layer: int, model: Linear) -> Scores:
    """``[rows]``: of the highest token of each."""
    logits, _, _ = highest(_states(features), layer, [model])
    return logits[:, 0]


def fitted_in_turns(
    states: TokenStates, labels: Labels, layer: int, regularisations: Sequence[float], rounds: int
) -> Iterator[list[Linear]]:
    """One fit for each penalty: to mean states, then after each round."""
    means = states.means(layer)
    models = [Rotated(means.astype(np.float64)).fit(labels, one) for one in regularisations]
    yield models
    attack, benign = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    found = [_Found(means[benign]) for _ in regularisations]
    for _ in range(rounds):
        _, at, vectors = highest(states, layer, models)
        fitted = []
        for i, regularisation in enumerate(regularisations):
            found[i].add(at[benign, i], vectors[benign, i])
            fitted.append(found[i].fit(vectors[attack, i], regularisation))
        models = fitted
        yield models


class _Found:
    """Tokens that were ever the highest of benign conversations, beginning with their means."""

    def __init__(self, means: FloatArray) -> None:
        self.vectors, self.rows = [means], [np.arange(len(means))]
        self.seen: list[set[int]] = [set() for _ in means]

    def add(self, at: Index, vectors: FloatArray) -> None:
        """at: ``[rows]``, which token each is."""
        new = np.flatnonzero([int(token) not in seen for token, seen in zip(at, self.seen, strict=True)])
        for row in new:
            self.seen[row].add(int(at[row]))
        self.vectors.append(vectors[new])
        self.rows.append(new)

    def fit(self, attacks: FloatArray, regularisation: float) -> Linear:
        """Every conversation counts the same among those of its label, and both labels count the same."""
        benign, rows = np.concatenate(self.vectors), np.concatenate(self.rows)
        count = len(self.seen) + len(attacks)
        of_benign = count / (2 * len(self.seen)) / np.bincount(rows)[rows]
        of_attacks = np.full(len(attacks), count / (2 * len(attacks)))
        labels = np.repeat([0, 1], [len(benign), len(attacks)])
        x = np.concatenate([benign, attacks]).astype(np.float64)
        return Rotated(x).fit(labels, regularisation, np.concatenate([of_benign, of_attacks]))


def highest(states: TokenStates, layer: int, models: Sequence[Linear]) -> tuple[Scores, Index, FloatArray]:
    """Of each row and model the highest token: its logit and number ``[rows, models]``, and its state
    ``[rows, models, hidden_size]``."""
    weight, bias = np.stack([one.weight for one in models], axis=1), np.array([one.bias for one in models])
    logits, at, vectors = [], [], []
    for row in range(len(states)):
        tokens = states.of(row, layer)
        every = tokens @ weight.astype(np.float32)
        best = every.argmax(axis=0)
        vectors.append(tokens[best])
        logits.append(np.einsum("md,dm->m", tokens[best].astype(np.float64), weight) + bias)
        at.append(best)
    return np.stack(logits), np.stack(at), np.stack(vectors)


def _out_of_fold(states: TokenStates, labels: Labels, groups: Sequence[str], one: Candidate, seed: int) -> Shortlisted:
    (layer,), rounds = one.choice.layers, one.rounds or 0

    def fit(index: Index) -> Linear:
        *_, (last,) = fitted_in_turns(states.part(index), labels[index], layer, [one.regularisation], rounds)
        return last

    unseen = np.zeros(len(labels))
    for seen, others in folds(labels, groups, seed):
        unseen[others] = highest(states.part(others), layer, [fit(seen)])[0][:, 0]
    measured = candidate(one.choice, one.regularisation, unseen, labels, rounds)
    return Shortlisted(measured, unseen, lambda: fit(np.arange(len(labels))))


def _states(features: Features) -> TokenStates:
    assert features.token_states is not None, "they are read where a probe may read the highest token"
    return features.token_states
