"""What an example cannot do with what it is given is one line and exit status 2, before any engine starts."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import NoReturn

import pytest

from guard.machine import free_port, vllm_build

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if "def main(" in path.read_text(encoding="utf-8"))
NO_NUMBERS = {"help", "model", "base-url", "api-key", "config", "weights", "out", "vectors", "no-compare"}

Told = Callable[..., str]

every = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Told:
    """What an example says that ends so."""
    if vllm_build() is None:
        pytest.skip("needs vLLM: make install")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    # Whoever starts one gets a traceback, which is no line.
    monkeypatch.setattr("vllm.LLM", None)
    monkeypatch.setattr("guard.mia.llm.MiaLLM.__init__", None)

    def told(name: str, *arguments: str, status: int = 2) -> str:
        for module in ("arguments", "door", "steering_door", name):
            sys.modules.pop(module, None)
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(name).main(list(arguments))
        said = capfd.readouterr()
        assert ended.value.code == status
        if status == 0:
            return said.out
        (line,) = said.err.splitlines()
        return line

    return told


def options_of(told: Told, name: str) -> set[str]:
    usage = told(name, "--help", status=0).split("\n\n")[0]
    return set(re.findall(r"\[--([a-z-]+)", usage))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model's folder of three layers with two heads, as far as one looks before it is loaded."""
    shape = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16, "model_type": "llama"}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return tmp_path / "small"


def test_every_example_is_looked_at() -> None:
    assert len(NAMES) == 8


@every
@pytest.mark.parametrize("value", ["-1", "many", "1.5"])
def test_numbers_that_cannot_be(told: Told, name: str, value: str) -> None:
    for option in options_of(told, name) - NO_NUMBERS:
        values = [value, "1"] if option == "head" else [value]
        assert f"argument --{option}: must be " in told(name, f"--{option}", *values), option


@pytest.mark.parametrize("option", ["answers", "tokens", "group"])
def test_none_at_all(told: Told, option: str) -> None:
    assert f"argument --{option}: must be a whole number from 1 " in told("capture_at_scale", f"--{option}", "0")


def test_more_answers_than_there_are_prompts(told: Told) -> None:
    assert "from 1 to 64, not '65'" in told("capture_at_scale", "--answers", "65")


@every
def test_models_that_are_not_there(told: Told, name: str, tmp_path: Path) -> None:
    assert "no model is called 'nothing'" in told(name, "--model", "nothing")
    assert f"there is no model in {tmp_path}" in told(name, "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "options", "lacks"),
    [
        ("hidden_states", ["--layers", "1", "4"], "no layer 4: the model in .+ has 3"),
        ("capture_at_scale", ["--layers", "4"], "no layer 4"),
        ("schema_linking", ["--head", "2", "2"], "no head 2: the model in .+ has 2"),
        ("schema_linking", ["--head", "0", "1"], "layers count from 1"),
        ("steering_language", ["--layer", "4"], "no layer 4"),
        ("instruction_following", ["--layer", "4"], "no layer 4"),
        ("detectors_offline", [], "no layer 30"),
        ("rerank", [], "no layer 24"),
    ],
)
def test_layers_and_heads_that_the_model_does_not_have(
    told: Told, small: Path, name: str, options: list[str], lacks: str
) -> None:
    assert re.search(lacks, told(name, "--model", str(small), *options))


@every
def test_servers_that_do_not_answer(told: Told, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "fitted_detectors":
        monkeypatch.setattr("detectors.calibration.of_references.final_norm", lambda _: ([1.0], 1e-5))
    more = ["--weights", str(tmp_path)] if name == "fitted_detectors" else []
    url = f"http://127.0.0.1:{free_port()}/v1"
    assert f"no server answers at {url}" in told(name, "--base-url", url, *more)
    for wrong in ("127.0.0.1:8001", "ftp://127.0.0.1/v1", "http://", "http://[/v1", "http://127.0.0.1:port/v1"):
        assert "argument --base-url: must be an address as http://" in told(name, "--base-url", wrong, *more)


class WantsAKey(BaseHTTPRequestHandler):
    """As vLLM with ``--api-key`` answers."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"error": "Unauthorized"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@every
def test_servers_that_want_another_key(told: Told, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--weights", str(tmp_path)] if name == "fitted_detectors" else []
    if more:
        monkeypatch.setattr("detectors.calibration.of_references.final_norm", lambda _: ([1.0], 1e-5))
    with HTTPServer(("127.0.0.1", 0), WantsAKey) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        assert f"the server at {url} wants a key: give its own with --api-key" in told(name, "--base-url", url, *more)
        wrong = told(name, "--base-url", url, "--api-key", "wrong", *more)
        assert "does not take this key: give its own with --api-key" in wrong
        assert "wrong" not in wrong.split("does not")[1]
        server.shutdown()


@pytest.fixture
def unheard() -> Iterator[Callable[[int, FrameType | None], NoReturn]]:
    """What SIGTERM finds where an example does not listen to it."""

    def unheard(_number: int, _frame: FrameType | None) -> NoReturn:
        raise AssertionError("nobody listens to SIGTERM")

    before = signal.signal(signal.SIGTERM, unheard)
    yield unheard
    signal.signal(signal.SIGTERM, before)


@every
def test_an_example_that_is_terminated_ends_the_engine_that_it_started(
    told: Told, name: str, small: Path, monkeypatch: pytest.MonkeyPatch, unheard: Callable[..., NoReturn]
) -> None:
    shape = json.loads((small / "config.json").read_text(encoding="utf-8"))
    large = {**shape, "num_hidden_layers": 30, "num_attention_heads": 9}
    (small / "config.json").write_text(json.dumps(large), encoding="utf-8")
    ended: list[bool] = []
    monkeypatch.setattr("guard.mia.llm.MiaLLM.__init__", lambda *_, **__: None)
    monkeypatch.setattr("guard.mia.llm.MiaLLM.chat", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr("guard.mia.llm.MiaLLM.close", lambda _: ended.append(True))
    if name == "fitted_detectors":
        monkeypatch.setattr("detectors.calibration.of_references.final_norm", lambda _: ([1.0], 1e-5))
    assert told(name, "--model", str(small), status=143).endswith(": stopped")
    assert ended == [True]
    assert signal.getsignal(signal.SIGTERM) is unheard


@every
def test_folders_that_cannot_be_written_to(told: Told, name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    served = ["--base-url", f"http://127.0.0.1:{free_port()}/v1"]
    for option in options_of(told, name) & {"out", "vectors"}:
        for folder in (tmp_path / "file", tmp_path / "file" / "below"):
            assert f"{folder}: cannot be written to: " in told(name, f"--{option}", str(folder), *served)


def test_files_that_say_nothing_of_heads_or_weights(told: Told, small: Path, tmp_path: Path) -> None:
    assert f"{tmp_path / 'none.json'}: No such file" in told("rerank", "--config", str(tmp_path / "none.json"))
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    assert "argument --config: " in told("rerank", "--config", str(tmp_path / "other.json"))
    url = ["--base-url", "http://127.0.0.1:9/v1"]
    assert "has no final RMS norm" in told("fitted_detectors", *url, "--weights", str(small))
    assert "there is no model in" in told("fitted_detectors", *url, "--weights", str(tmp_path / "none"))
    assert "--base-url needs --weights" in told("fitted_detectors", *url)
