"""H-Node's files, MIA's and ours, and what it says of readouts that are not there. The formula: ``test_in_engine``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detectors.calibration.fit_h_node import Statements, fit_h_node, h_node_files
from detectors.h_node import HNode, HNodeConfig
from detectors.model_config import ModelConfigError, ModelInfo
from detectors.registry import build_detector
from guard.mia.results import HiddenReadout, ProbeReadout, Readout, RowsReadout
from tests.detectors.weights import build

SIZE = 6
RANDOM = np.random.default_rng(2)
MIA: dict[str, Any] = {
    "best_layer": 14,
    "hidden_size": SIZE,
    "weights": RANDOM.normal(size=(1, SIZE)),
    "bias": RANDOM.normal(size=1),
    "scaler_mean": RANDOM.normal(size=SIZE),
    "scaler_scale": RANDOM.uniform(1, 2, size=SIZE),
    "h_node_indices": np.array([1, 4]),
    "h_node_baselines": np.array([0.1, -0.2]),
    "baseline_percentile": 90.0,
    "n_h_nodes": 2,
    "train_size": 210,
    "eval_size": 90,
}


def mia_files(folder: Path, **changes: Any) -> Path:
    np.savez(folder / "probe.npz", **{**MIA, **changes})
    (folder / "probe.json").write_text(
        json.dumps({"model_name": "Qwen2.5-1.5B-Instruct", "auc_per_layer": {"14": 0.9}})
    )
    return folder / "probe.npz"


def state(x: np.ndarray) -> dict[str, Readout]:
    return {"layer14": HiddenReadout("complete", 14, 9, 5, x.astype(np.float32))}


def test_mias_probe_gives_mias_numbers(tmp_path: Path) -> None:
    detector = build_detector("h_node", mia_files(tmp_path))
    assert isinstance(detector, HNode)
    assert detector.config.model_info.name == "Qwen2.5-1.5B-Instruct"
    (capture,) = detector.plan().hidden.values()
    assert (capture.layer, capture.positions) == (14, "last_prompt")
    x = RANDOM.normal(size=SIZE)
    logit = ((x - MIA["scaler_mean"]) / MIA["scaler_scale"]) @ MIA["weights"][0] + MIA["bias"][0]
    score = detector.score(state(x))
    assert score.value == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)
    excess = np.maximum(x[[1, 4]] - MIA["h_node_baselines"], 0).mean()
    assert dict(score.details)["excess"] == pytest.approx(excess, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": np.array([object()], dtype=object)}, "cannot be read as MIA's probe"),
        ({"hidden_size": SIZE + 1}, "hidden_size is 7, and the weights are for 6"),
        ({"scaler_mean": np.zeros(SIZE + 1)}, "must hold"),
        ({"scaler_scale": np.zeros(SIZE)}, "scales are positive"),
        ({"h_node_indices": np.array([1, SIZE])}, "at most 256 indices below 6"),
        ({"bias": np.array([np.nan])}, "finite numbers"),
        ({"weights": np.ones(SIZE, np.complex64)}, "finite numbers"),
        ({"best_layer": np.array(2 + 0j)}, "finite numbers"),
        ({"h_node_baselines": np.ones(2, np.bool_)}, "finite numbers"),
        ({"bias": np.zeros(2)}, "the bias is one number"),
        ({"best_layer": np.array(-1)}, "best_layer: must be at least 0"),
        ({"best_layer": np.array(2.5)}, "best_layer: must be one whole number"),
        ({"best_layer": np.array([1, 2])}, "best_layer: must be one whole number"),
        ({"best_layer": np.array(10**9)}, "best_layer: must be at most"),
        ({"hidden_size": np.zeros(0)}, "hidden_size: must be one whole number"),
    ],
)
def test_a_probe_of_mias_that_cannot_be_used_is_refused_with_its_file(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=rf"probe\.npz: .*{message}"):
        build_detector("h_node", mia_files(tmp_path, **changes))


def test_a_pickle_in_place_of_an_archive_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "probe.npz").write_bytes(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.")
    with pytest.raises(ModelConfigError, match="cannot be read as MIA's probe"):
        build_detector("h_node", tmp_path / "probe.npz")


def tensors() -> dict[str, np.ndarray]:
    vector = np.ones(SIZE, np.float32)
    return {
        "weight": vector,
        "bias": np.zeros(1, np.float32),
        "mean": vector,
        "scale": vector,
        "node_indices": np.array([0, 2], np.int64),
        "node_baselines": np.zeros(2, np.float32),
    }


def test_weights_that_are_no_real_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="weights are not finite numbers"):
        build(
            tmp_path,
            "h_node",
            {**tensors(), "weight": np.ones(SIZE, np.complex64)},
            layer=14,
            hidden_size=SIZE,
            nodes=2,
        )


def ours(folder: Path, **params: Any) -> HNode:
    made: HNode = build(folder, "h_node", tensors(), **{"layer": 14, "hidden_size": SIZE, "nodes": 2, **params})
    return made


def rows(values: np.ndarray, **changes: Any) -> RowsReadout:
    given = {"status": "complete", "layer": 14, "positions": tuple(range(9, 9 + len(values))), "values": values}
    return RowsReadout(**{**given, "token_ids": (1,) * len(values), **changes})


@pytest.mark.parametrize(
    ("readouts", "reason"),
    [
        ({}, "no hidden state of layer 14 came back"),
        ({"layer14": rows(np.ones((2, SIZE)), status="dropped", reason="no room")}, "no room"),
        ({"layer14": rows(np.ones((2, SIZE - 1)))}, "another model"),
        ({"layer14": rows(np.full((1, SIZE), np.nan))}, "not finite"),
        ({"layer14": rows(np.zeros((0, SIZE)))}, "one token or none"),
        ({"layer14": RowsReadout("complete", 14)}, "one token or none"),
        ({"layer14": ProbeReadout("complete", "x")}, "no hidden state"),
    ],
)
def test_says_why_there_is_no_score_instead_of_raising(tmp_path: Path, readouts: Any, reason: str) -> None:
    score = ours(tmp_path).score(readouts)
    assert (score.status, score.value) == ("unavailable", None)
    assert reason in score.reason


def test_the_engine_sends_one_number_more_than_there_are_nodes(tmp_path: Path) -> None:
    detector = ours(tmp_path).computed(in_engine=True)
    ((name, probe),) = detector.plan().probes.items()
    assert (probe.layer, probe.positions, probe.weight.shape) == (14, "generated", (3, SIZE))
    logits = np.array([[0.0, 1.0, -5.0]], np.float32)
    score = detector.score({name: ProbeReadout("complete", probe.name, (9,), (1,), logits)})
    assert (score.value, dict(score.details)["excess"]) == (0.5, 0.5)
    assert (
        detector.score({name: ProbeReadout("complete", probe.name, (9,), (1,), logits[:, :2])}).status == "unavailable"
    )


def test_a_weights_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="'node_indices'"):
        ours(tmp_path, nodes=3)


def test_fitting_finds_the_layer_and_the_nodes_that_tell_made_up_statements(tmp_path: Path) -> None:
    def statements(rows: int, seed: int) -> Statements:
        random = np.random.default_rng(seed)
        labels = np.arange(rows) % 2
        states = {layer: random.normal(size=(rows, 20)) for layer in (2, 5)}
        states[5][:, 7] += 2.0 * labels
        states[5][:, 11] -= 2.0 * labels
        return Statements(states, labels, [str(i // 2) for i in range(rows)])

    train, validation, held_out = (statements(rows, seed) for seed, rows in enumerate((200, 80, 80)))
    fitted = fit_h_node(train, validation, seed=0, nodes=4)
    assert fitted.layer == 5
    assert 7 in fitted.weights.indices
    assert 11 not in fitted.weights.indices, "it is low where statements are made up"
    params, raw = h_node_files(fitted, "tiny", read="prompt")
    (tmp_path / "tiny.safetensors").write_bytes(raw)
    config = HNodeConfig(model_info=ModelInfo(name="tiny"), params=params)
    (tmp_path / "tiny.json").write_text(config.model_dump_json())
    detector = HNode.load(tmp_path / "tiny.json")
    values = []
    for x, logit in zip(held_out.states[5], fitted.logits(held_out.states), strict=True):
        score = detector.score({"layer5": HiddenReadout("complete", 5, 9, 1, x.astype(np.float32))})
        assert score.value == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-4)
        values.append(score.value)
    assert np.mean(np.array(values)[held_out.labels == 1]) > np.mean(np.array(values)[held_out.labels == 0]) + 0.5
