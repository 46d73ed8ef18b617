"""The examples against a server: the same lines as offline, and one line where the server lacks something."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from guard.mia import MiaClient
from guard.steering.vector_files import write_vector
from tests.engine.server import KEY, Server

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

Run = Callable[..., list[str]]
Refused = Callable[..., str]


@pytest.fixture
def run(server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs an example's ``main`` against the server. Returns the lines that it prints."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, *arguments: str) -> list[str]:
        for module in ("arguments", "door", "steering_door", name):
            sys.modules.pop(module, None)
        example = importlib.import_module(name)
        capfd.readouterr()
        example.main(["--model", "tiny", "--base-url", f"{server.url}/v1", "--api-key", KEY, *arguments])
        return capfd.readouterr().out.splitlines()

    return run


@pytest.fixture
def refused(run: Run, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Runs an example that ends with exit status 2. Returns the one line that it says."""

    def refused(name: str, *arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            run(name, *arguments)
        (line,) = capfd.readouterr().err.splitlines()
        assert ended.value.code == 2
        return line

    return refused


def test_hidden_states_and_columns_come_from_a_server(run: Run) -> None:
    lines = run("hidden_states", "--layers", "1", "3")
    assert len(lines) == 4
    assert all("last token (1, 128), mean (128,)" in line and "generated (7, 128)" in line for line in lines)
    assert len(run("schema_linking", "--head", "3", "2", "--questions", "1")) == 3


def test_answers_captured_from_a_server_are_whole_files(run: Run, tmp_path: Path) -> None:
    options = ["--answers", "3", "--group", "2", "--tokens", "9", "--layers", "1", "3", "--out", str(tmp_path)]
    *progress, _ = run("capture_at_scale", *options)
    assert [line.split(",")[:2] for line in progress] == [
        ["2 files", " 32 states of tokens"],
        ["3 files", " 48 states of tokens"],
    ]
    whole = load_file(tmp_path / "answer-0002.safetensors")
    assert (whole["layer1"].shape, whole["layer3"].shape, whole["token_ids"].shape) == ((8, 128), (8, 128), (9,))

    # As a run that was stopped leaves it: one is there, one is cut off, one is missing.
    (tmp_path / "answer-0000.safetensors").unlink()
    (tmp_path / "answer-0002.safetensors").write_bytes((tmp_path / "answer-0002.safetensors").read_bytes()[:-1])
    kept = (tmp_path / "answer-0001.safetensors").stat().st_mtime_ns
    there, *progress, _ = run("capture_at_scale", *options)
    assert there == f"1 of 3 answers are in {tmp_path} already"
    assert [line.split(",")[0] for line in progress] == ["2 files"]
    assert (tmp_path / "answer-0001.safetensors").stat().st_mtime_ns == kept
    again = load_file(tmp_path / "answer-0002.safetensors")
    assert np.array_equal(again["token_ids"], whole["token_ids"])
    assert np.allclose(again["layer3"], whole["layer3"], atol=1e-4)
    assert run("capture_at_scale", *options) == [f"all 3 answers are in {tmp_path} already"]


def test_answers_of_another_run_are_neither_kept_nor_replaced(run: Run, refused: Refused, tmp_path: Path) -> None:
    options = ["--answers", "1", "--layers", "1", "--no-compare", "--out", str(tmp_path)]
    run("capture_at_scale", *options, "--tokens", "3")
    there = (tmp_path / "answer-0000.safetensors").read_bytes()
    assert "is of another run" in refused("capture_at_scale", *options, "--tokens", "4")
    assert (tmp_path / "answer-0000.safetensors").read_bytes() == there
    save_file({"layer1": np.zeros((2, 128), np.float32)}, tmp_path / "answer-0000.safetensors")
    assert "it does not say which" in refused("capture_at_scale", *options, "--tokens", "3")


def test_a_folder_that_becomes_full_is_one_line_and_the_run_goes_on_later(
    run: Run, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--answers", "3", "--group", "1", "--tokens", "3", "--layers", "1", "--no-compare"]
    options += ["--out", str(tmp_path)]
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "answer-0001" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        assert "answer-0001.safetensors: cannot be written: No space left" in refused("capture_at_scale", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["answer-0000.safetensors"]
    assert run("capture_at_scale", *options)[0] == f"1 of 3 answers are in {tmp_path} already"


def test_two_detectors_are_fitted_to_a_few_rows_with_a_servers_states(run: Run, model_folder: Path) -> None:
    lines = run("fitted_detectors", "--layers", "1", "3", "--weights", str(model_folder / "model"))
    scores = [float(line.split(": ")[1].split()[0]) for line in lines]
    assert [line.split(":")[0] for line in lines] == ["not supported"] * 3 + ["risk"] * 2
    assert all(0 <= score <= 1 for score in scores)


def test_vectors_are_learnt_from_a_server_and_loaded_into_it(run: Run, server: Server) -> None:
    vectors = server.folder.parent / "vectors"
    try:
        told = "\n".join(run("steering_language", "--vectors", str(vectors), "--layer", "2"))
    finally:
        forget(server, "french")
    plain, *steered = re.findall(r"^coefficient .+ of function words, perplexity ([\d.]+)$", told, re.MULTILINE)
    assert len(steered) == 2
    assert steered[-1] != plain


@pytest.mark.parametrize(
    ("example", "options", "lacks", "adds"),
    [
        ("hidden_states", ["--layers", "0"], "no hidden-state tap at layer 0", '"hidden_layers": [0]'),
        ("capture_at_scale", ["--layers", "9"], "no hidden-state tap at layer 9", '"hidden_layers": [9]'),
        ("schema_linking", ["--head", "2", "1"], "no attention tap", '"attention_heads": [[2, 1]]'),
    ],
)
def test_a_missing_tap_is_one_line_that_says_what_to_add(
    refused: Refused, example: str, options: list[str], lacks: str, adds: str
) -> None:
    line = refused(example, *options)
    assert lacks in line
    assert 'start the server with --additional-config \'{"mia": {' in line
    assert adds in line


def test_a_layer_that_is_not_steered_and_a_folder_of_somebody_else_are_one_line(
    refused: Refused, server: Server, tmp_path: Path
) -> None:
    line = refused("instruction_following", "--layer", "3", "--vectors", str(tmp_path))
    assert line.endswith("must be the server's steering_folder")
    vectors = server.folder.parent / "vectors"
    try:
        # The server has one of this name now, which a run that writes elsewhere must not take for its own.
        write_vector(vectors, "list", np.ones(128, np.float32), {})
        line = refused("instruction_following", "--layer", "3", "--vectors", str(tmp_path))
        assert "the engine has another vector 'list' than the one just written" in line
        line = refused("instruction_following", "--layer", "3", "--vectors", str(vectors))
        assert re.search(r'not steer at layer 3; .+"steering_layers": \[3\]', line)
    finally:
        forget(server, "list")


def forget(server: Server, vector: str) -> None:
    (server.folder.parent / "vectors" / f"{vector}.safetensors").unlink()
    MiaClient(f"{server.url}/v1", api_key=KEY).client.delete(f"/mia/vectors/{vector}", cast_to=object)


def test_a_model_that_the_server_does_not_serve_and_answers_longer_than_it_allows_are_one_line(
    refused: Refused, tmp_path: Path
) -> None:
    assert "`nothing` does not exist" in refused("hidden_states", "--model", "nothing", "--layers", "1")
    assert "2048" in refused("capture_at_scale", "--layers", "1", "--tokens", "9999", "--answers", "1")
