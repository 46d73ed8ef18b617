"""Stretches of long documents: their masses, and the heads that are chosen for them."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.calibration.long_readings import Whole
from detectors.calibration.stretches import choose_heads, found_by, profile_of, scalings, stretches_of


def whole(seed: int, attack: tuple[int, int] | None = None, drawn: float = 0.0) -> Whole:
    """Of 300 tokens, 20 of them instruction and 260 data; ``drawn``: how much head 3 looks at the attack."""
    weights = np.random.default_rng(seed).dirichlet(np.ones(300), 5).astype(np.float32)
    if attack is not None:
        weights[3, slice(*attack)] += drawn
        weights[3] /= weights[3].sum()
    mass = np.stack([weights[:, 5:25].sum(axis=1), weights[:, 30:290].sum(axis=1)], axis=-1)
    return Whole(weights, mass, np.zeros((1, 2), np.float32), ((5, 25),), ((30, 290),), attack)


def test_a_stretch_has_the_attention_on_its_tokens_and_its_share_of_the_attack() -> None:
    read = whole(1, (100, 120))
    found = stretches_of(read, 64)
    assert (found.starts[0], found.ends[-1]) == (30, 290)
    for i, (start, end) in enumerate(zip(found.starts, found.ends, strict=True)):
        assert found.mass[i] == pytest.approx(read.weights[:, start:end].sum(axis=1), abs=1e-5)
        inside = len(set(range(start, end)) & set(range(100, 120))) / 20
        assert found.overlap[i] == pytest.approx(inside)


def test_the_head_that_looks_at_attacks_is_chosen_and_finds_their_place() -> None:
    documents = [f"document {i // 2}" for i in range(40)]
    labels = np.array([i % 2 for i in range(40)], np.int64)
    read = [stretches_of(whole(i, (40 + 5 * i, 60 + 5 * i) if i % 2 else None, 0.02), 64) for i in range(40)]
    ways = scalings(profile_of([one for one, label in zip(read, labels, strict=True) if not label]))
    for name, scaling in ways.items():
        values = [scaling(one) for one in read]
        heads, merit = choose_heads(values, labels, documents)
        assert (3 in heads, merit > 0.9) == (True, True), name
        found = found_by([one[:, [3]].mean(axis=1) for one in values], [one.overlap for one in read])
        assert found.hit[labels == 1].mean() > found.chance[labels == 1].mean()
