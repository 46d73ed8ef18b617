"""The probe against scikit-learn on the same vectors, and on whatever an engine may send."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save
from sklearn.linear_model import LogisticRegression

from detectors.model_config import ModelConfigError
from detectors.probe import Probe, ProbeConfig, sigmoid
from guard.mia.results import AttentionReadout, HiddenMeanReadout, HiddenReadout, Readout, RowsReadout
from guard.mia.spec import TokenRanges

SIZE = 8


def write(
    folder: Path, weight: np.ndarray, bias: float, layers: tuple[int, ...] = (2, 5), sha256: str | None = None
) -> Path:
    raw = save({"weight": weight.astype(np.float32), "bias": np.array([bias], np.float32)})
    (folder / "tiny.safetensors").write_bytes(raw)
    params = {
        "layers": layers,
        "hidden_size": SIZE,
        "weights": "tiny.safetensors",
        "weights_sha256": sha256 or hashlib.sha256(raw).hexdigest(),
    }
    path = folder / "tiny.json"
    path.write_text(json.dumps({"model_info": {"name": "tiny"}, "params": params}))
    return path


def in_memory(weight: np.ndarray, bias: float = 0.0, pooling: str = "last_token") -> Probe:
    params = {"layers": [2, 5], "hidden_size": SIZE, "weights": "tiny.safetensors", "weights_sha256": ""}
    params["pooling"] = pooling
    config = ProbeConfig.model_validate({"model_info": {"name": "tiny"}, "params": params})
    return Probe(config, weight.astype(np.float32), bias)


def hidden(layer: int, values: np.ndarray | None, **changes: Any) -> HiddenReadout:
    return HiddenReadout(**{"status": "complete", "layer": layer, "values": values, **changes})


def both(x: np.ndarray) -> dict[str, Readout]:
    return {"layer2": hidden(2, x[:SIZE]), "layer5": hidden(5, x[SIZE:])}


def test_gives_the_probability_that_scikit_learn_gives(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 2 * SIZE)).astype(np.float32)
    labels = (x[:, 3] + generator.normal(size=60) > 0).astype(int)
    model = LogisticRegression().fit(x, labels)
    probe = Probe.load(write(tmp_path, model.coef_[0], model.intercept_[0]))

    values = [probe.score(both(row)).value for row in x]

    assert values == pytest.approx(list(model.predict_proba(x)[:, 1]), abs=1e-5)


def test_plans_one_hidden_state_for_each_layer(tmp_path: Path) -> None:
    plan = Probe.load(write(tmp_path, np.zeros(2 * SIZE), 0)).plan()
    assert [capture.layer for capture in plan.hidden.values()] == [2, 5]
    assert not plan.attention
    assert not plan.spans


@given(arrays(np.float32, 2 * SIZE, elements=st.floats(-1e6, 1e6, width=32)))
def test_is_a_probability_whatever_the_state(x: np.ndarray) -> None:
    score = in_memory(np.linspace(-3, 3, 2 * SIZE)).score(both(x))
    assert score.value is not None
    assert 0 <= score.value <= 1


@given(st.floats(-1e300, 1e300))
def test_sigmoid_of_a_and_of_minus_a_add_up_to_one(logit: float) -> None:
    assert sigmoid(logit) + sigmoid(-logit) == pytest.approx(1)


@given(arrays(np.float32, (5, 2, SIZE), elements=st.floats(-4, 4, width=32)))
def test_the_mean_state_scores_as_the_states_of_all_tokens_do(states: np.ndarray) -> None:
    probe = in_memory(np.linspace(-1, 1, 2 * SIZE), 0.5, pooling="mean")
    rows: dict[str, Readout] = {
        f"layer{layer}": RowsReadout("complete", layer, tuple(range(5)), (0,) * 5, states[:, i])
        for i, layer in enumerate((2, 5))
    }
    means: dict[str, Readout] = {
        f"layer{layer}": HiddenMeanReadout("complete", layer, ((0, 5),), states[:, i].mean(axis=0))
        for i, layer in enumerate((2, 5))
    }
    assert probe.score(means).value == pytest.approx(probe.score(rows).value, abs=1e-5)


def test_only_a_probe_that_pools_by_mean_asks_for_the_mean_and_never_token_by_token() -> None:
    weight, tokens = np.ones(2 * SIZE), TokenRanges(tokens=((0, 5),))
    for pooling in ("last_token", "mean", "max"):
        probe = in_memory(weight, pooling=pooling)
        assert {one.average for one in probe.plan().hidden.values()} == {pooling == "mean"}
        assert not any(one.average for one in probe.token_plan(tokens).hidden.values())


def test_a_mean_of_no_token_is_no_score() -> None:
    nothing: dict[str, Readout] = {f"layer{layer}": HiddenMeanReadout("complete", layer) for layer in (2, 5)}
    score = in_memory(np.ones(2 * SIZE), pooling="mean").score(nothing)
    assert (score.status, score.value) == ("unavailable", None)


GOOD = np.ones(SIZE, np.float32)


@pytest.mark.parametrize(
    "second",
    [
        None,
        AttentionReadout("complete", ((1, 0),)),
        hidden(5, None, status="dropped", reason="no room"),
        hidden(5, None),
        hidden(5, np.ones(SIZE - 1, np.float32)),
        hidden(5, np.full(SIZE, np.nan, np.float32)),
    ],
)
def test_says_why_there_is_no_score_instead_of_raising(second: Readout | None) -> None:
    readouts: dict[str, Readout] = {"layer2": hidden(2, GOOD)} | ({} if second is None else {"layer5": second})
    score = in_memory(np.ones(2 * SIZE)).score(readouts)
    assert score.status == "unavailable"
    assert score.value is None
    assert score.reason


def test_weights_of_another_calibration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"tiny\.safetensors.*same calibration"):
        Probe.load(write(tmp_path, np.zeros(2 * SIZE), 0, sha256="0" * 64))


def test_weights_of_the_wrong_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"must hold 'weight' \[24\]"):
        Probe.load(write(tmp_path, np.zeros(2 * SIZE), 0, layers=(1, 2, 5)))


def test_a_weights_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, np.zeros(2 * SIZE), 0)
    (tmp_path / "tiny.safetensors").write_bytes(b"not this")
    with pytest.raises(ModelConfigError, match="cannot be read as safetensors"):
        Probe.load(path)


def test_weights_elsewhere_than_beside_the_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, np.zeros(2 * SIZE), 0)
    path.write_text(path.read_text().replace('"tiny.safetensors"', '"../tiny.safetensors"'))
    with pytest.raises(ModelConfigError, match=r"params\.weights"):
        Probe.load(path)
