"""Calibration from rows and features to files, on synthetic features with a planted layer, direction and head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from detectors.attention_tracker import AttentionTracker
from detectors.calibration.features import Features
from detectors.calibration.fitted import Fitted, Job, write
from detectors.calibration.of_prompts import KINDS, fit_on_prompts
from detectors.calibration.rows import Row, default_rows
from detectors.calibration.scoring import combined, scores_of
from detectors.calibration.sources import DataError
from detectors.combination import Combination
from detectors.probe import Probe
from detectors.registry import build_detector
from detectors.text_baseline import TextBaseline
from guard.mia.results import HiddenReadout

LAYER, DIRECTION, HEAD = 3, 5, (2, 1)
"""Where attacks show: one component at one layer, and one head that looks away from the instruction."""

LAYERS = (1, 2, 3, 4)
HEADS = tuple((layer, head) for layer in LAYERS for head in range(3))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return default_rows(seed=0, tool_role=True)


@pytest.fixture(scope="module")
def features(rows: list[Row]) -> Features:
    generator = np.random.default_rng(0)
    attack = np.array([row.label == "attack" for row in rows])
    hidden = generator.normal(size=(len(rows), len(LAYERS), 16)).astype(np.float32)
    hidden[:, LAYERS.index(LAYER), DIRECTION] += 4.0 * attack
    mass = generator.uniform(0.2, 0.4, size=(len(rows), len(HEADS), 2)).astype(np.float32)
    mass[attack, HEADS.index(HEAD), 0] *= 0.2
    tokens = np.full(len(rows), 9, np.float32)
    return Features(LAYERS, HEADS, hidden, mass, (), np.zeros((len(rows), 0, 16), np.float32), tokens)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    model = tmp_path_factory.mktemp("model")
    (model / "model.safetensors").write_bytes(b"weights")
    return Job(model, "tiny", "tiny", KINDS, 0, "guard calibrate")


@pytest.fixture(scope="module")
def result(job: Job, rows: list[Row], features: Features) -> dict[str, Fitted]:
    return fit_on_prompts(job, rows, features)


@pytest.fixture(scope="module")
def written(result: dict[str, Fitted], job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model_configs")
    paths = write(result, job, out)
    assert {path.relative_to(out).as_posix() for path in paths} == {
        "attention_tracker/tiny.json",
        "combination/tiny.json",
        "probe/tiny.json",
        "probe/tiny.safetensors",
        "text_baseline/tiny.json",
        "text_baseline/tiny.safetensors",
        "text_baseline/tiny.vocabulary.json",
        "tool_call_risk/tiny.json",
        "tool_call_risk/tiny.safetensors",
    }
    return out


def test_the_probe_finds_the_planted_layer_and_direction(written: Path) -> None:
    probe = Probe.load(written / "probe" / "tiny.json")
    assert LAYER in probe.config.params.layers
    start = probe.config.params.layers.index(LAYER) * 16
    assert np.argmax(np.abs(probe.weight)) == start + DIRECTION


def test_the_tracker_finds_the_planted_head(written: Path) -> None:
    tracker = AttentionTracker.load(written / "attention_tracker" / "tiny.json")
    assert tracker.heads == (HEAD,)


def test_the_written_probe_scores_held_out_rows_as_its_file_says(
    written: Path, rows: list[Row], features: Features
) -> None:
    probe = build_detector("probe", written / "probe" / "tiny.json")
    assert isinstance(probe, Probe)
    assert probe.config.calibration is not None
    point = probe.config.calibration.thresholds["balanced"]
    hits = {"benign": 0, "attack": 0}
    for i, row in enumerate(rows):
        if row.split == "held_out":
            readouts = {
                f"layer{layer}": HiddenReadout("complete", layer, values=features.hidden[i, LAYERS.index(layer)])
                for layer in probe.config.params.layers
            }
            value = probe.score(readouts).value
            assert value is not None
            hits[row.label] += value >= point.value
    assert hits == {"benign": point.held_out_false_positives, "attack": point.held_out_true_positives}


def test_the_files_say_how_they_came_about(result: dict[str, Fitted], rows: list[Row]) -> None:
    assert tuple(result) == KINDS
    for kind, fitted in result.items():
        calibration = fitted.config.calibration
        assert calibration is not None
        assert calibration.quality.auroc > (0.8 if kind == "text_baseline" else 0.9)
        measured = [row for row in rows if row.place == "tool" or kind != "tool_call_risk"]
        assert calibration.quality.benign == sum(r.split == "held_out" and r.label == "benign" for r in measured)
        assert {source.name for source in calibration.data} <= {"bastioncorpus", "own", "spikee"}
        assert sum(n for s in calibration.data for split in s.rows.values() for n in split.values()) == len(measured)
        assert calibration.choices


def test_the_written_text_baseline_and_combination_hit_what_their_files_say(
    written: Path, rows: list[Row], features: Features
) -> None:
    probe = build_detector("probe", written / "probe" / "tiny.json")
    text = build_detector("text_baseline", written / "text_baseline" / "tiny.json")
    combination = build_detector("combination", written / "combination" / "tiny.json")
    assert isinstance(probe, Probe)
    assert isinstance(text, TextBaseline)
    assert isinstance(combination, Combination)
    fitted_to = {kind: one.fitted_to for kind, one in combination.config.params.inputs.items()}
    assert fitted_to == {"probe": probe.config.fingerprint, "text_baseline": text.config.fingerprint}
    held_out = [i for i, row in enumerate(rows) if row.split == "held_out"]
    inputs = {
        "probe": scores_of(probe, features.part(held_out)),
        "text_baseline": np.array([text.score_text(rows[i].text).value for i in held_out]),
    }
    attack = np.array([rows[i].label == "attack" for i in held_out])
    for detector, scores in ((text, inputs["text_baseline"]), (combination, combined(combination, inputs))):
        assert detector.config.calibration is not None
        for point in detector.config.calibration.thresholds.values():
            assert (scores[~attack] >= point.value).sum() == point.held_out_false_positives
            assert (scores[attack] >= point.value).sum() == point.held_out_true_positives


def test_a_kind_that_the_rows_do_not_suffice_for_is_left_out_and_said(
    job: Job, rows: list[Row], features: Features
) -> None:
    kept = [i for i, row in enumerate(rows) if row.place != "tool"]
    few, less, said = [rows[i] for i in kept], features.part(kept), list[str]()
    both = replace(job, kinds=("attention_tracker", "tool_call_risk"))
    assert list(fit_on_prompts(both, few, less, said.append)) == ["attention_tracker"]
    assert any("left out tool_call_risk" in line and "role tool" in line for line in said)
    with pytest.raises(DataError, match="role tool"):
        fit_on_prompts(replace(job, kinds=("tool_call_risk",)), few, less)


def test_the_same_input_gives_the_same_files(
    result: dict[str, Fitted], job: Job, rows: list[Row], features: Features
) -> None:
    assert fit_on_prompts(replace(job, kinds=("probe", "tool_call_risk")), rows, features) == {
        kind: result[kind] for kind in ("probe", "tool_call_risk")
    }


def test_features_without_a_signal_give_a_probe_that_says_so(job: Job, rows: list[Row], features: Features) -> None:
    noise = np.random.default_rng(1).normal(size=features.hidden.shape).astype(np.float32)
    blind = replace(features, hidden=noise)
    config = fit_on_prompts(replace(job, kinds=("probe",)), rows, blind)["probe"].config
    assert config.calibration is not None
    assert 0.3 < config.calibration.quality.auroc < 0.7
