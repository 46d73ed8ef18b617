"""What was calibrated for other weights, or fitted to another detector, is said where a policy is checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from detectors.calibration.ledger_thresholds import recalibrate
from detectors.combination import Combination
from detectors.model_config import ModelConfigError
from detectors.probe import Probe
from guard.data import data_folder
from guard.doctor import check_taps
from guard.model_weights import quick_weights_sha256, weights_sha256
from guard.policy_cli import policy_app

KEY = "SmolLM2-135M-Instruct"
POLICY = """
version: 1
name: p
detectors:
  injection: {kind: probe}
  words: {kind: text_baseline}
  both: {kind: combination, inputs: {probe: injection, text_baseline: words}}
rules:
  - {name: r, when: {detector: both, at_least: fpr_1pct}, action: block}
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the shipped calibrations' name, and weights of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / KEY
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"tuned a little further")
    return folder


def lint(*arguments: object) -> str:
    done = CliRunner().invoke(policy_app, ["lint", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "model_configs"
    for kind in ("probe", "text_baseline", "combination"):
        (folder / kind).mkdir(parents=True)
        for path in (data_folder("model_configs") / kind).glob(f"{KEY}.*"):
            shutil.copy(path, folder / kind)
    return folder


def rewritten(path: Path, change: Any) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def test_lint_says_which_detectors_were_calibrated_on_other_weights(policy: Path, model: Path) -> None:
    said = lint(policy, "--model", model)
    for name in ("injection: its probe", "both: its combination"):
        assert f"note: detector {name} was calibrated on other weights" in said
    assert "words" not in said  # it reads text alone
    assert "calibrated on other weights" in lint(policy.parent, "--model", model)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_hidden_layers": 3}, "detector injection: its probe reads layer "),
        ({"hidden_size": 64}, "detector injection: its probe is for states of 576 components, and the model's have 64"),
        ({"num_attention_heads": 1}, "detector focus: its attention_tracker reads heads "),
    ],
)
def test_lint_refuses_files_of_a_model_that_has_other_layers_heads_or_width(
    tmp_path: Path, model: Path, changed: dict[str, int], told: str
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        POLICY.replace("rules:", "  focus: {kind: attention_tracker}\nrules:").replace(
            "rules:", "rules:\n  - {name: f, when: {detector: focus, at_least: fpr_5pct}, action: flag}"
        )
    )
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576}
    (model / "config.json").write_text(json.dumps(shape))
    assert "ok" in lint(path, "--model", model)
    (model / "config.json").write_text(json.dumps({"text_config": {**shape, **changed}}))
    for checked in (path, tmp_path):
        done = CliRunner().invoke(policy_app, ["lint", str(checked), "--model", str(model)])
        assert done.exit_code == 1
        assert told in done.output
    (check,) = check_taps(str(model), path, "cpu", [], 8 << 30)
    assert (check.name, check.level) == ("taps", "fail")
    assert told in check.found


@pytest.mark.parametrize(
    ("heads", "told"),
    [
        ([[99, 0]], "reads heads of layer 99, and the model has 30 layers, counted from 0"),
        ([[30, 0], [29, 8]], "reads heads of layer 30, and the model has 30 layers, counted from 0"),
        ([[1, 50], [0, 8]], "reads heads [[1, 50]], and each layer of the model has 9"),
    ],
)
def test_lint_names_layers_and_heads_as_the_file_does(
    tmp_path: Path, model: Path, heads: list[list[int]], told: str
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\nname: p\ndetectors: {focus: {kind: attention_tracker}}\n"
        "rules: [{name: f, when: {detector: focus, at_least: 0.9}, action: flag}]\n"
    )
    (model / "config.json").write_text('{"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576}')
    file = tmp_path / "model_configs" / "attention_tracker" / f"{KEY}.json"
    file.parent.mkdir(parents=True)
    shutil.copy(data_folder("model_configs") / "attention_tracker" / f"{KEY}.json", file)
    rewritten(file, lambda raw: raw["params"].update(important_heads=heads))
    command = ["lint", str(path), "--model", str(model), "--model-configs", str(tmp_path / "model_configs")]
    done = CliRunner().invoke(policy_app, command)
    assert done.exit_code == 1
    assert told in done.output
    assert done.output.count("another model's") == 1


def test_of_the_weights_that_it_was_calibrated_on_nothing_is_said(policy: Path, model: Path, tmp_path: Path) -> None:
    folder, sha256 = copied(tmp_path), weights_sha256(model)
    for kind in ("probe", "text_baseline", "combination"):
        rewritten(folder / kind / f"{KEY}.json", lambda raw: raw["calibration"].update(model_sha256=sha256))
    assert "note" not in lint(policy, "--model", model, "--model-configs", folder)


def test_a_combination_says_that_an_input_was_refitted_without_it(policy: Path, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    fitted_to = Probe.load(folder / "probe" / f"{KEY}.json").config.fingerprint
    combination = folder / "combination" / f"{KEY}.json"
    rewritten(combination, lambda raw: raw["params"]["inputs"]["probe"].update(fitted_to=fitted_to))
    assert "fitted to another" not in lint(policy, "--model", KEY, "--model-configs", folder)
    rewritten(combination, lambda raw: raw["params"]["inputs"]["probe"].update(fitted_to="0" * 12))
    said = lint(policy, "--model", KEY, "--model-configs", folder)
    assert f"fitted to another probe than injection is (000000000000, not {fitted_to})" in said
    assert "guard calibrate probe text_baseline combination" in said
    rewritten(combination, lambda raw: raw["params"]["inputs"]["probe"].update(fitted_to="x"))
    with pytest.raises(ModelConfigError, match="fitted_to"):
        Combination.load(combination)


def test_doctor_says_so_too(policy: Path, model: Path) -> None:
    found = [check for check in check_taps(str(model), policy, "cpu", [], 8 << 30) if check.name == "calibration"]
    assert {check.level for check in found} == {"warn"}
    assert any("injection: its probe was calibrated on other weights" in check.found for check in found)


def test_a_hash_is_computed_anew_when_the_weights_change(model: Path) -> None:
    first = weights_sha256(model)
    assert weights_sha256(model) == quick_weights_sha256(model) == first
    (model / "model.safetensors").write_bytes(b"tuned a little further still")
    assert weights_sha256(model) != first
    assert quick_weights_sha256(model.parent / "nowhere") is None


WITHOUT = "fpr_1pct was measured without them"


@pytest.fixture
def windowed(tmp_path: Path) -> tuple[Path, Path]:
    """A policy of a copy of the shipped probe with windows, and that file."""
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\nname: p\ndetectors: {long: {kind: probe, config: long}}\n"
        "rules: [{name: r, when: {not: {detector: long, below: fpr_1pct}}, action: block}]\n"
    )
    file = copied(tmp_path) / "probe" / "long.json"
    shutil.copy(file.with_name(f"{KEY}.json"), file)
    rewritten(file, lambda raw: raw["params"].update(windows={}))
    return path, file


@pytest.mark.parametrize("with_model", [True, False])
def test_lint_says_that_a_named_threshold_was_measured_without_the_files_windows(
    windowed: tuple[Path, Path], model: Path, with_model: bool
) -> None:
    path, file = windowed
    more = ("--model-configs", file.parents[1], *(("--model", model) if with_model else ()))
    assert f"note: detector long: its probe has windows, and {WITHOUT}" in lint(path, *more)
    path.write_text(path.read_text().replace("fpr_1pct", "0.97"))
    assert "windows" not in lint(path, *more)


def test_lint_says_it_of_text_too(windowed: tuple[Path, Path]) -> None:
    path, file = windowed
    path.write_text(path.read_text().replace("kind: probe", "kind: text_baseline"))
    text = file.parents[1] / "text_baseline" / "long.json"
    shutil.copy(text.with_name(f"{KEY}.json"), text)
    assert "windows" not in lint(path, "--model-configs", file.parents[1])
    rewritten(text, lambda raw: raw["params"].update(windows={}))
    assert WITHOUT in lint(path, "--model-configs", file.parents[1])


def test_lint_says_nothing_of_thresholds_that_were_measured_with_windows(windowed: tuple[Path, Path]) -> None:
    path, file = windowed
    configs = ("--model-configs", file.parents[1])
    plain = file.read_text()
    rewritten(file, lambda raw: raw["calibration"].update(command="guard calibrate probe --data all --windows"))
    assert "without them" not in lint(path, *configs)

    file.write_text(plain)
    measured = {"long": f"probe@0+{Probe.load(file).config.fingerprint}"}
    lines = [{"request_id": "r", "scores": {"long": i / 1000}, "measured": measured} for i in range(900)]
    ledger = file.with_name("ledger.jsonl")
    ledger.write_text("\n".join(map(json.dumps, lines)))
    told = list(recalibrate(file, ledger, "long", [0.01, 0.05]))
    assert any(line.startswith("fpr_1pct: ") for line in told)
    assert "without them" not in lint(path, *configs)

    # Set from traffic with one kind of windows, and then given another.
    rewritten(file, lambda raw: raw["params"].update(windows={"stride": 100}))
    assert WITHOUT in lint(path, *configs)
