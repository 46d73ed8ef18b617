"""Probes of the highest token, on tokens of which one in an attack shows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from detectors.calibration import fit_probe as chooser
from detectors.calibration.feature_store import FeatureError
from detectors.calibration.features import Features
from detectors.calibration.fit_max import fitted_in_turns, highest
from detectors.calibration.fit_probe import fit_probe
from detectors.calibration.metrics import Labels, auroc
from detectors.calibration.probe_candidates import LabelledRows
from detectors.calibration.rows import Row
from detectors.calibration.token_states import TokenStates, TokenStore
from guard.mia.results import FloatArray, Readouts, RowsReadout

LAYERS, SIZE, TOKENS = (2, 4), 12, 30
SHOWING, COMMON = 3, 7
"""Components: attacks have one token that is high in the first. Every conversation has some that are high in the
second, attacks more of them on average: the mean goes by it, and of the highest token it says nothing."""


def states(attack: bool, noise: np.random.Generator) -> FloatArray:
    """``[tokens, SIZE]``."""
    tokens = noise.normal(size=(TOKENS, SIZE)).astype(np.float32)
    tokens[noise.choice(TOKENS, noise.integers(3, 8) + 2 * attack, replace=False), COMMON] += 8.0
    if attack:
        tokens[noise.integers(TOKENS), SHOWING] += 6.0
    return tokens


def rows_of(count: int, split: str, folder: Path) -> LabelledRows:
    noise = np.random.default_rng([count, len(split)])
    labels: Labels = np.arange(count) % 3 // 2
    store = TokenStore("m", LAYERS, folder)
    rows = [
        Row(
            f"{split}{i}",
            "s",
            f"g{split}{i}",
            "train",
            "benign",
            messages=({"role": "user", "content": f"{split}{i}"},),
        )
        for i in range(count)
    ]
    means = []
    for row, label in zip(rows, labels, strict=True):
        assert store.lacks(row)
        tokens = {layer: states(bool(label), noise) for layer in LAYERS}
        positions = tuple(range(TOKENS))
        store.take(
            row,
            Readouts(
                {
                    f"tokens{layer}": RowsReadout("complete", layer, positions, values=one)
                    for layer, one in tokens.items()
                }
            ),
        )
        assert not store.lacks(row)
        means.append(np.stack([tokens[layer].mean(axis=0) for layer in LAYERS]))
    last = noise.normal(size=(count, len(LAYERS), SIZE)).astype(np.float32)
    features = Features(
        LAYERS, (), last, np.zeros((count, 0, 2), np.float32), LAYERS, np.stack(means), np.full(count, TOKENS), None
    )
    features = Features(*list(vars(features).values())[:-1], token_states=store.states(rows))
    return LabelledRows(features, labels, [row.group for row in rows])


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[LabelledRows, LabelledRows, LabelledRows]:
    folder = tmp_path_factory.mktemp("kept")
    return rows_of(240, "train", folder), rows_of(180, "validation", folder), rows_of(300, "held out", folder)


def test_taking_turns_finds_the_token_that_shows_it(
    parts: tuple[LabelledRows, LabelledRows, LabelledRows],
) -> None:
    train, _, held_out = parts
    seen, unseen = train.features.token_states, held_out.features.token_states
    assert seen is not None
    assert unseen is not None
    found = []
    for (model,) in fitted_in_turns(seen, train.labels, 4, [0.01], 3):
        logits, at, vectors = highest(unseen, 4, [model])
        found.append(auroc(logits[:, 0], held_out.labels))
        tokens = unseen.of(5, 4)
        assert logits[5, 0] == pytest.approx((tokens.astype(np.float64) @ model.weight + model.bias).max(), abs=1e-5)
        assert (vectors[5, 0] == tokens[at[5, 0]]).all()
    # A fit to means, read at the highest token, and the same after three rounds.
    assert found[0] < 0.9
    assert found[-1] > 0.97


def test_the_best_way_to_pool_is_chosen_and_the_others_are_told(
    parts: tuple[LabelledRows, LabelledRows, LabelledRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, validation, held_out = parts
    # Of each way enough of a shortlist that all three have candidates to tell.
    monkeypatch.setattr(chooser, "REGULARISATIONS", (1e-2,))
    fitted = fit_probe(train, validation, 0, "best")
    assert fitted.choice.pooling == "max"
    assert len(fitted.layers) == 1
    assert all(
        f"{pooling} of layers" in fitted.choices["layers and regularisation"] for pooling in ("mean", "last_token")
    )
    assert "after" in fitted.choices["layers and regularisation"]
    assert auroc(fitted.logits(held_out.features), held_out.labels) > 0.97
    assert auroc(fitted.unseen, np.concatenate([train.labels, validation.labels])) > 0.95


def test_states_that_float16_does_not_hold_are_kept_to_its_precision(tmp_path: Path) -> None:
    store = TokenStore("m", (1,), tmp_path)
    row = Row("a", "s", "g", "train", "benign", messages=({"role": "user", "content": "a"},))
    large = np.array([[3.0e5, -2.0, 0.5]], np.float32)
    store.take(row, Readouts({"tokens1": RowsReadout("complete", 1, (0,), values=large)}))
    assert store.states([row]).of(0, 1) == pytest.approx(large, rel=2e-3)


def test_a_file_of_states_that_was_cut_off_is_an_error_and_read_again(tmp_path: Path) -> None:
    store = TokenStore("m", (1,), tmp_path)
    row = Row("a", "s", "g", "train", "benign", messages=({"role": "user", "content": "a"},))
    store.take(row, Readouts({"tokens1": RowsReadout("complete", 1, (0,), values=np.ones((1, 3), np.float32))}))
    states: TokenStates = store.states([row])
    states.paths[0].write_bytes(states.paths[0].read_bytes()[:20])
    with pytest.raises(FeatureError, match="run the command once more"):
        states.of(0, 1)
    assert store.lacks(row)
    with pytest.raises(FeatureError, match=r"row a: no hidden states of the data at layer 1: dropped no room"):
        store.take(row, Readouts({"tokens1": RowsReadout("dropped", 1, reason="no room")}))
