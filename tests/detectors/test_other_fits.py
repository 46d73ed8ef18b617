"""Science claims and tool-call risk: fitted to planted signals, written, loaded, and the same again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detectors.calibration.fit_h_node import Statements
from detectors.calibration.fit_science import fit_science, science_files
from detectors.calibration.fit_tool_risk import fit_tool_risk, tool_risk_files
from detectors.linear import sigmoid
from detectors.model_config import ModelConfigError, ModelInfo
from detectors.science_hallucination import ScienceConfig, ScienceHallucination, rms_norm
from detectors.science_prompt import EXAMPLES, LABELS
from detectors.tool_call_risk import ToolCallRisk, ToolCallRiskConfig
from guard.mia.results import HiddenReadout, RowsReadout
from tests.detectors.weights import build

SIZE = 40


def science_rows(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = np.arange(rows) % 3
    x = random.normal(size=(rows, SIZE)) + 3 * np.eye(SIZE)[labels]
    return x, labels


def test_a_fitted_science_classifier_tells_the_three_labels(tmp_path: Path) -> None:
    gain = np.random.default_rng(9).uniform(0.5, 2, SIZE)
    (a, train), (b, validation), (x, labels) = (science_rows(rows, seed) for seed, rows in enumerate((240, 90, 90)))
    fitted = fit_science(rms_norm(a, gain, 1e-5), train, rms_norm(b, gain, 1e-5), validation)
    params, raw = science_files(fitted, gain, 1e-5, 30, "tiny")
    (tmp_path / "tiny.safetensors").write_bytes(raw)
    config = ScienceConfig(model_info=ModelInfo(name="tiny"), params=params)
    (tmp_path / "tiny.json").write_text(config.model_dump_json())
    detector = ScienceHallucination.load(tmp_path / "tiny.json")
    right = 0
    for state, label in zip(x, labels, strict=True):
        score = detector.score_pass({"state": HiddenReadout("complete", 30, 9, 1, state.astype(np.float32))})
        shares = dict(score.details)
        assert sum(shares.values()) == pytest.approx(1)
        assert score.value == pytest.approx(1 - shares["entailment"])
        right += max(shares, key=lambda name: shares[name]) == LABELS[label]
    assert right > 0.9 * len(labels)


def test_rows_without_one_of_the_labels_are_refused() -> None:
    x, labels = science_rows(30, 0)
    with pytest.raises(ValueError, match="need all labels"):
        fit_science(x, np.minimum(labels, 1), x, labels)


def test_a_classifier_for_other_words_is_refused(tmp_path: Path) -> None:
    tensors = {name: np.zeros((3, SIZE)[i:], np.float32) for i, name in enumerate(("weight", "norm_gain"))}
    other = hashlib.sha256(b"other words").hexdigest()
    with pytest.raises(ModelConfigError, match=r"params\.prompt_sha256: fitted to another conversation"):
        build(
            tmp_path, "science_hallucination", {**tensors, "bias": np.zeros(3, np.float32)},
            layer=30, hidden_size=SIZE, norm_eps=1e-5, prompt_sha256=other,
        )  # fmt: skip


def test_the_conversation_has_two_examples_of_each_label() -> None:
    assert sorted(label for _, _, label in EXAMPLES) == sorted(LABELS * 2)


def test_a_fitted_tool_call_probe_is_one_plain_readout(tmp_path: Path) -> None:
    def steps(rows: int, seed: int) -> Statements:
        random = np.random.default_rng(seed)
        labels = np.arange(rows) % 2
        direction = np.ones(SIZE) / np.sqrt(SIZE)
        states = {layer: random.normal(size=(rows, SIZE)) for layer in (3, 6)}
        states[6] += np.outer(4.0 * labels, direction)
        return Statements(states, labels, [str(i) for i in range(rows)])

    train, validation, held_out = (steps(rows, seed) for seed, rows in enumerate((160, 80, 80)))
    fitted = fit_tool_risk(train, validation)
    assert fitted.layer == 6
    params, raw = tool_risk_files(fitted, "tiny")
    (tmp_path / "tiny.safetensors").write_bytes(raw)
    config = ToolCallRiskConfig(model_info=ModelInfo(name="tiny"), params=params)
    (tmp_path / "tiny.json").write_text(config.model_dump_json())
    detector = ToolCallRisk.load(tmp_path / "tiny.json")
    values = [
        detector.score({"prompt6": HiddenReadout("complete", 6, 9, 1, x.astype(np.float32))}).value
        for x in held_out.states[6]
    ]
    assert values == pytest.approx(sigmoid(fitted.logits(held_out.states)).tolist(), abs=1e-4)
    assert np.mean((np.array(values) > 0.5) == held_out.labels) > 0.9


@pytest.mark.parametrize(
    "params", [{"at": "before_call"}, {"at": "last_prompt", "call_token_ids": [3]}], ids=lambda params: params["at"]
)
def test_only_a_probe_before_calls_knows_how_calls_begin(tmp_path: Path, params: Any) -> None:
    tensors = {"weight": np.zeros(SIZE, np.float32), "bias": np.zeros(1, np.float32)}
    with pytest.raises(ModelConfigError, match="before_call needs call_token_ids"):
        build(tmp_path, "tool_call_risk", tensors, layers=[6], hidden_size=SIZE, **params)


def test_without_the_answers_states_there_is_no_score(tmp_path: Path) -> None:
    tensors = {"weight": np.zeros(SIZE, np.float32), "bias": np.zeros(1, np.float32)}
    risk = build(
        tmp_path, "tool_call_risk", tensors, layers=[6], hidden_size=SIZE, at="before_call", call_token_ids=[3]
    )  # fmt: skip
    prompt = HiddenReadout("complete", 6, 9, 1, np.zeros(SIZE, np.float32))
    assert risk.score({"prompt6": prompt}).status == "unavailable"
    dropped = RowsReadout("dropped", 6, reason="no room")
    assert risk.score({"prompt6": prompt, "answer6": dropped}).reason == "no room"
