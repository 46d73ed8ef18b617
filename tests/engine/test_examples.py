"""The examples run, on a tiny random model instead of SmolLM2, and print and write what they say."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.engine import engines, oracle

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(oracle.save("llama", tmp_path_factory.mktemp("examples-model")))


@pytest.fixture
def run(model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs an example's ``main`` in this process. Returns the lines that it prints."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, *arguments: str) -> list[str]:
        for module in ("door", name):
            sys.modules.pop(module, None)
        with engines.in_process():
            example = importlib.import_module(name)
            assert Path(example.__file__).parent == EXAMPLES
            capfd.readouterr()
            example.main(["--model", model, *arguments])
        return [line for line in capfd.readouterr().out.splitlines() if not line.startswith(("INFO", "WARNING"))]

    return run


def test_reranking_prints_every_document_best_first(run: Any, tmp_path: Path) -> None:
    config = {"model_info": {"name": "tiny"}, "params": {"important_heads": [[0, 1], [2, 3]]}}
    (tmp_path / "heads.json").write_text(json.dumps(config))
    scores = [float(line.split()[0]) for line in run("rerank", "--config", str(tmp_path / "heads.json"))]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)


def test_schema_linking_prints_chosen_and_needed_columns(run: Any) -> None:
    lines = run("schema_linking", "--head", "2", "1", "--questions", "2")
    assert lines[0] == "In which cities do the owners live?"
    assert re.fullmatch(r"  chosen: \w+@\w+(, \w+@\w+)*", lines[1])
    assert lines[2] == "  needed: city@owner"
    assert len(lines) == 6


def test_hidden_states_have_the_shapes_that_were_asked_for(run: Any) -> None:
    lines = run("hidden_states", "--layers", "0", "2")
    assert len(lines) == 4
    assert all("last token (1, 128), mean (128,)" in line and "generated (7, 128)" in line for line in lines)


def test_capture_at_scale_writes_every_generated_token(run: Any, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    counted, timed = run(
        "capture_at_scale", "--answers", "5", "--group", "2", "--tokens", "9", "--layers", "1", "3", *out
    )
    assert counted.startswith("5 files, 80 states of tokens, ")
    assert re.search(r"without capture [\d.]+ s; with it and the files [\d.]+ s, \d+ states/s", timed)
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == 5
    saved = load_file(files[0])
    assert (saved["layer1"].shape, saved["layer3"].shape, saved["token_ids"].shape) == ((8, 128), (8, 128), (9,))
    assert np.isfinite(saved["layer3"]).all()


def test_detectors_without_a_calibration_are_fitted_and_score(run: Any) -> None:
    lines = run("fitted_detectors", "--layers", "1", "3")
    scores = [float(re.fullmatch(r"(?:not supported|risk): (\d\.\d{3})  .+", line)[1]) for line in lines]  # type: ignore[index]
    assert len(scores) == 5
    assert all(0 <= score <= 1 for score in scores)


def test_the_shipped_detectors_are_named_with_the_model_that_they_are_for() -> None:
    """It needs the real model; its way to a score is tested with detectors of the tiny one."""
    text = (EXAMPLES / "detectors_offline.py").read_text()
    for kind in re.findall(r'"(probe|attention_tracker|h_node)"', text):
        assert (EXAMPLES.parent / "model_configs" / kind / "SmolLM2-135M-Instruct.json").is_file()
