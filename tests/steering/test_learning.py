"""What is learnt from states of which the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from guard.steering.learning import LearningError, learn

PAIRS, LAYERS, SIZE = 40, 2, 24
RANDOM = np.random.default_rng(0)
DIRECTION = RANDOM.normal(size=(LAYERS, SIZE))


def sides(noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Positive sides lie one direction from the negative ones, with noise."""
    negative = RANDOM.normal(size=(PAIRS, LAYERS, SIZE))
    positive = negative + DIRECTION + noise * RANDOM.normal(size=negative.shape)
    return positive.astype(np.float32), negative.astype(np.float32)


@pytest.mark.parametrize("method", ["diff", "pca"])
def test_a_planted_direction_is_found_with_its_length_and_sign(method: str) -> None:
    positive, negative = sides(noise=0.05)
    first, second = learn(positive, negative, (4, 9), method)
    assert (first.layer, second.layer) == (4, 9)
    for i, one in enumerate((first, second)):
        assert one.vector == pytest.approx(DIRECTION[i], abs=0.05)
        assert one.held_out == 1.0
        assert one.stream_norm == pytest.approx(
            np.linalg.norm(np.concatenate([positive[:, i], negative[:, i]]), axis=-1).mean(), rel=1e-5
        )


def test_turning_the_sides_round_turns_the_vector_round() -> None:
    positive, negative = sides(noise=0.5)
    for method in ("diff", "pca"):
        (forth, _), (back, _) = (learn(*both, (1, 2), method) for both in ((positive, negative), (negative, positive)))
        assert forth.vector == pytest.approx(-back.vector, abs=1e-5)


def test_pca_keeps_to_the_direction_that_most_pairs_share_where_a_few_go_astray() -> None:
    positive, negative = sides(noise=0.05)
    astray = RANDOM.normal(size=SIZE)
    astray -= DIRECTION[0] * (astray @ DIRECTION[0]) / (DIRECTION[0] @ DIRECTION[0])
    positive[:4, 0] += (2 * astray / np.linalg.norm(astray) * np.linalg.norm(DIRECTION[0])).astype(np.float32)

    def cosine(method: str) -> float:
        vector = learn(positive, negative, (1, 2), method)[0].vector
        return float(vector @ DIRECTION[0] / np.linalg.norm(vector) / np.linalg.norm(DIRECTION[0]))

    assert cosine("diff") < 0.99
    assert cosine("pca") > 0.9


def test_where_there_is_nothing_to_learn_held_out_pairs_are_at_chance() -> None:
    noise = [np.random.default_rng(seed).normal(size=(2, 400, 1, SIZE)).astype(np.float32) for seed in range(5)]
    shares = [learn(one[0], one[1], (1,), "diff")[0].held_out for one in noise]
    assert 0.4 < np.mean(shares) < 0.6


def test_sides_that_are_the_same_to_the_model_are_told_with_their_layer() -> None:
    positive, negative = sides(noise=0.05)
    positive[:, 1] = negative[:, 1]
    with pytest.raises(LearningError, match="layer 9"):
        learn(positive, negative, (4, 9), "diff")
