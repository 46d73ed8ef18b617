"""The one real pair, engine and proxy, that all tests marked ``engine`` share, started as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from guard.machine import free_port, vllm_build
from guard.mia.registry import PluginRegistry

START_LIMIT_S = 300
STOP_LIMIT_S = 40
DEFAULT_POLICY = Path(__file__).parent.parent / "policies" / "default.yaml"


@dataclass(frozen=True)
class RunningPair:
    """URLs without a trailing slash or path; the OpenAI client wants ``proxy_url + "/v1"``."""

    engine_url: str
    proxy_url: str
    ledger_path: Path
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="session")
def running_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    if vllm_build() is None:
        pytest.skip("needs vLLM: make install")
    folder = tmp_path_factory.mktemp("pair")
    port, engine_port = free_port(), free_port()
    command = [sys.executable, "-m", "guard", "serve", "--policy", str(DEFAULT_POLICY), "--port", str(port)]
    command += ["--engine-port", str(engine_port), "--ledger", str(folder / "ledger.jsonl")]
    with (folder / "serve.log").open("wb") as log:
        # A session of its own, so that the whole group can be ended whatever happened to its leader.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}/health", folder / "serve.log")
        yield RunningPair(
            f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{port}", folder / "ledger.jsonl", process
        )
    finally:
        _end(process)


@pytest.fixture(scope="session")
def engine_url(running_pair: RunningPair) -> str:
    """vLLM itself, without the guard."""
    return running_pair.engine_url


@pytest.fixture(scope="session")
def proxy_url(running_pair: RunningPair) -> str:
    return running_pair.proxy_url


@pytest.fixture(scope="session")
def ledger_path(running_pair: RunningPair) -> Path:
    return running_pair.ledger_path


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            pytest.fail(f"guard serve ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - a loopback address
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.3)
    pytest.fail(f"guard serve was not ready after {START_LIMIT_S} s:\n{log.read_text()[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """First as Ctrl-C does, which stops the engine too, then by force."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(autouse=True)
def registered_analyzers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(PluginRegistry, "_registered", {})
