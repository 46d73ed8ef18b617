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
        for module in ("arguments", "door", name):
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
    options = ["--answers", "5", "--group", "2", "--tokens", "9", "--layers", "1", "3", *out]
    *progress, timed = run("capture_at_scale", *options)
    assert [line.split(",")[0] for line in progress] == ["2 files", "4 files", "5 files"]
    assert re.fullmatch(r"5 files, 80 states of tokens, [\d.]+ MiB, \d+ states/s", progress[-1])
    assert re.match(r"without capture [\d.]+ s; with it and the files [\d.]+ s; most memory", timed)
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == 5
    saved = load_file(files[0])
    assert (saved["layer1"].shape, saved["layer3"].shape, saved["token_ids"].shape) == ((8, 128), (8, 128), (9,))
    assert np.isfinite(saved["layer3"]).all()


def test_what_vllm_does_not_start_with_is_told_in_the_last_line(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("capture_at_scale", "--tokens", "1000000", "--layers", "1")
    assert re.search(r": the engine does not start: .*max_model_len", capfd.readouterr().err.splitlines()[-1])


def test_one_token_of_an_answer_is_no_state_and_no_error(run: Any, tmp_path: Path) -> None:
    run("capture_at_scale", "--answers", "2", "--tokens", "1", "--layers", "3", "--out", str(tmp_path))
    saved = load_file(tmp_path / "answer-0001.safetensors")
    assert (saved["layer3"].shape, saved["token_ids"].shape) == ((0, 128), (1,))


def test_detectors_are_fitted_to_a_few_rows_and_score(run: Any) -> None:
    lines = run("fitted_detectors", "--layers", "1", "3")
    scores = [float(re.fullmatch(r"(?:not supported|risk): (\d\.\d{3})  .+", line)[1]) for line in lines]  # type: ignore[index]
    assert len(scores) == 5
    assert all(0 <= score <= 1 for score in scores)
