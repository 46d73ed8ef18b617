"""A proxy as users run it, uvicorn and all, in front of an engine without a model."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import save

from guard.proxy import provider_process
from guard.proxy.app import application
from guard.proxy.services import Services
from guard.proxy_server import Stopping, listening_socket, serving
from guard.settings import Settings
from tests.proxy.engine import FakeEngine, running

POLICY = """\
version: 1
name: test
prompt_timeout_s: 30
detectors:
  danger: {kind: probe}
rules:
  - name: stop
    when: {detector: danger, at_least: 0.9}
    action: block
    on_error: flag
  - name: calm
    when: {detector: danger, at_least: 0.7, below: 0.9}
    action: steer
    steer: [{vector: calm, layer: 3, coefficient: 2}]
    on_error: allow
  - name: watch
    when: {detector: danger, at_least: 0.5}
    action: flag
    on_error: allow
"""
IMPATIENT = POLICY.replace("prompt_timeout_s: 30", "prompt_timeout_s: 0.3")
"""For scores that do not come. With those that do, a busy machine would make them late."""

BLOCKED, STEERED, FLAGGED, CLEAN = 5.0, 1.5, 0.5, -5.0
"""Logits for the four outcomes."""

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "private words"}]}


@dataclass
class Proxy:
    """``url`` without path. ``engine``: what stands behind it."""

    url: str
    engine: FakeEngine
    ledger: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def post(
        self, body: Any = None, headers: dict[str, str] | None = None, *, path: str = "/v1/chat/completions"
    ) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(BODY if body is None else body).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=data, headers=headers) as answer,
        ):
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path, headers=headers) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()

    async def entries(self, count: int) -> list[dict[str, Any]]:
        """The ledger, once it has ``count`` entries."""
        for _ in range(400):
            lines = self.ledger.read_text().splitlines()
            if len(lines) >= count:
                return [json.loads(line) for line in lines]
            await asyncio.sleep(0.01)
        raise AssertionError(f"the ledger has {len(lines)} entries, not {count}")

    async def entry(self) -> dict[str, Any]:
        (entry,) = await self.entries(1)
        return entry


StartProxy = Callable[..., AbstractAsyncContextManager[Proxy]]


async def eventually(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def start_proxy(tmp_path: Path) -> StartProxy:
    """Starts a proxy with ``policy``, or the files at ``path``, in front of
    ``engine``, which need not run, with other settings as given."""
    write_probe(tmp_path / "model_configs" / "probe")

    @asynccontextmanager
    async def start(
        engine: FakeEngine, policy: str = POLICY, path: Path | None = None, **settings: Any
    ) -> AsyncIterator[Proxy]:
        (tmp_path / "policy.yaml").write_text(policy)
        given = {
            "upstream": engine.url,
            "policy": path or tmp_path / "policy.yaml",
            "config_key": "tiny",
            "model_configs": tmp_path / "model_configs",
            "ledger": tmp_path / "ledger.jsonl",
        }
        made = Settings(**(given | settings))
        services = Services(made)
        malformed = services.metrics.count_malformed
        with listening_socket("127.0.0.1", 0, made.client_timeout_s) as listener:
            async with serving(application(services), listener, on_malformed=malformed, stopping=Stopping(limit_s=1)):
                yield Proxy(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, tmp_path / "ledger.jsonl")

    return start


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> AsyncIterator[Proxy]:
    """A proxy in front of a running engine."""
    async with running(FakeEngine()) as engine, start_proxy(engine) as proxy:
        yield proxy


def write_probe(folder: Path, size: int = 1) -> None:
    """A probe whose score is the sigmoid of the sum of the numbers, one unless given, in its hidden state."""
    folder.mkdir(parents=True)
    weights = save({"weight": np.ones(size, np.float32), "bias": np.zeros(1, np.float32)})
    (folder / "tiny.safetensors").write_bytes(weights)
    params = {"layers": [3], "hidden_size": size, "weights": "tiny.safetensors"}
    params["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    (folder / "tiny.json").write_text(json.dumps({"model_info": {"name": "tiny"}, "params": params}))


class _Kept(provider_process.Child):
    """Stays when its proxy ends; started anew once it died."""

    one: _Kept | None = None

    def __new__(cls) -> _Kept:
        if cls.one is None or cls.one.process.poll() is not None:
            cls.one = super().__new__(cls)
        return cls.one

    def __init__(self) -> None:
        if not hasattr(self, "process"):
            super().__init__()

    def end(self) -> None:
        """At the end of all tests."""


@pytest.fixture(scope="session")
def _kept_process() -> Iterator[type[provider_process.Child]]:
    yield _Kept
    if _Kept.one is not None:
        provider_process.Child.end(_Kept.one)


@pytest.fixture
def one_process(_kept_process: type[provider_process.Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """litellm takes seconds to load: one process for all tests that do not look at its life."""
    monkeypatch.setattr(provider_process, "Child", _kept_process)
