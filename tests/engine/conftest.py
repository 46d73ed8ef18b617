"""One server on a tiny model for all tests that ask it over HTTP with a key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from guard.engine_process import EngineProcess
from guard.machine import vllm_build
from tests.engine.server import KEY, Server, command, save_vector
from tests.engine.tiny_models import save_tiny_model
from tests.servers import START_LIMIT_S


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if vllm_build() is None:
        pytest.skip("needs vLLM: make install")
    folder = tmp_path_factory.mktemp("server")
    save_tiny_model("llama", folder / "model")
    save_vector(folder, "push", 1)
    return folder


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Server]:
    artifacts = model_folder / "artifacts"
    engine = EngineProcess(command(model_folder, artifacts, "--api-key", KEY))
    try:
        asyncio.run(engine.wait_healthy(START_LIMIT_S))
        yield Server(engine.command.url, artifacts)
    finally:
        asyncio.run(engine.stop())
