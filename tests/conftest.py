"""The one real pair, engine and proxy, that all tests marked ``engine`` share, started as a user starts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from guard.machine import free_port, vllm_build
from guard.mia.registry import PluginRegistry
from guard.models import DEFAULT_MODEL
from tests.servers import end, wait_ready

DEFAULT_POLICY = Path(__file__).parent.parent / "policies" / "default.yaml"


RETRY_POLICY = Path(__file__).parent.parent / "examples" / "policies" / "retry-steered.yaml"
SELECTION = (
    "{version: 1, default: default, assignments: [{name: also, policy: retry-steered, match: {routes: [/v1/rerank]}}]}"
)
"""An engine has taps for every policy that may judge."""

SHARED = ("running_pair", "server")
"""Fixtures of a session that start an engine."""

LONG = {"steering", "engine", "calibration", "test_v2.py"}
"""Folders and files whose tests start engines of their own, or fit detectors."""

# Two processes of tests share the cores: threads of one engine that wait in a loop would take those of the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# litellm asks the network for prices when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


# pytest-xdist's own hook of this name reads the groups, and would come before this one.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For pytest-xdist: what shares an engine stays in one process, and what shares a module's fixtures, too.

    The longest file, a test for each architecture, shares nothing: its tests run wherever there is room. What takes
    minutes comes first, so that at the end there are short ones for both processes.
    """
    items.sort(key=lambda item: LONG.isdisjoint((item.path.name, item.path.parent.name)))
    for item in items:
        names: list[str] = getattr(item, "fixturenames", [])
        group = next((name for name in SHARED if name in names), str(item.path))
        if item.path.name != "test_architectures.py":
            item.add_marker(pytest.mark.xdist_group(group))


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
    from guard.serve import engine_config_of

    folder = tmp_path_factory.mktemp("pair")
    port, engine_port = free_port(), free_port()
    command = [sys.executable, "-m", "guard", "serve", "--policy", str(DEFAULT_POLICY), "--port", str(port)]
    command += ["--engine-port", str(engine_port), "--ledger", str(folder / "ledger.jsonl")]
    # Tests put more proxies in front of the engine, whose policies read more than the default one does.
    (folder / "policies").mkdir()
    for policy in (DEFAULT_POLICY, RETRY_POLICY):
        shutil.copy(policy, folder / "policies")
    (folder / "policies" / "selection.yaml").write_text(SELECTION)
    taps = engine_config_of(DEFAULT_MODEL, folder / "policies", folder / "probes")
    command += ["--", "--additional-config", taps]
    with (folder / "serve.log").open("wb") as log:
        # A session of its own, so that the whole group can be ended whatever happened to its leader.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_ready(process, f"http://127.0.0.1:{port}/health", folder / "serve.log")
        yield RunningPair(
            f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{port}", folder / "ledger.jsonl", process
        )
    finally:
        end(process)


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


@pytest.fixture(autouse=True)
def registered_analyzers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(PluginRegistry, "_registered", {})
