"""The examples against a server: the same lines as offline, and one line where the server lacks something."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from guard.machine import free_port
from guard.mia import MiaClient
from tests.engine.server import KEY, Server

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

Run = Callable[..., list[str]]


@pytest.fixture
def run(server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs an example's ``main`` against the server. Returns the lines that it prints."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, *arguments: str) -> list[str]:
        for module in ("door", "steering_door", name):
            sys.modules.pop(module, None)
        example = importlib.import_module(name)
        capfd.readouterr()
        example.main(["--model", "tiny", "--base-url", f"{server.url}/v1", "--api-key", KEY, *arguments])
        return capfd.readouterr().out.splitlines()

    return run


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
    saved = load_file(tmp_path / "answer-0002.safetensors")
    assert (saved["layer1"].shape, saved["layer3"].shape, saved["token_ids"].shape) == ((8, 128), (8, 128), (9,))


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
    run: Run, example: str, options: list[str], lacks: str, adds: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(example, *options)
    (line,) = str(ended.value).splitlines()
    assert lacks in line
    assert 'start the server with --additional-config \'{"mia": {' in line
    assert adds in line


def test_a_layer_that_is_not_steered_and_a_folder_of_somebody_else_are_one_line(
    run: Run, server: Server, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"must be the server's steering_folder$"):
        run("instruction_following", "--layer", "3", "--vectors", str(tmp_path))
    vectors = server.folder.parent / "vectors"
    try:
        with pytest.raises(SystemExit, match=r'^[^\n]+ not steer at layer 3; [^\n]+"steering_layers": \[3\][^\n]+$'):
            run("instruction_following", "--layer", "3", "--vectors", str(vectors))
    finally:
        forget(server, "list")


def forget(server: Server, vector: str) -> None:
    (server.folder.parent / "vectors" / f"{vector}.safetensors").unlink()
    MiaClient(f"{server.url}/v1", api_key=KEY).client.delete(f"/mia/vectors/{vector}", cast_to=object)


def test_no_server_is_one_line(run: Run) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(SystemExit, match=f"^no server answers at {url}"):
        run("hidden_states", "--base-url", url)
