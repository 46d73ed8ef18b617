"""A proxy with its admin port, in front of an engine without a model, as ``guard proxy`` would start both."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from guard.console.app import operators_app
from guard.console.sessions import SAME_PAGE
from guard.proxy.app import application
from guard.proxy.keys import NewKey, create_key
from guard.proxy.services import Services
from guard.proxy_server import Stopping, listening_socket, serving
from guard.settings import Settings
from tests.proxy.conftest import POLICY, Proxy, write_probe
from tests.proxy.engine import FakeEngine, running

SECOND = POLICY.replace("name: test", "name: second").replace("at_least: 0.9", "at_least: 0.999")
"""The same, but for what it blocks."""


@dataclass
class Console(Proxy):
    """``url``: the proxy's; ``admin_url``: the admin port's, without path."""

    admin_url: str
    admin_key: str
    client_key: str
    services: Services

    async def chat(self, **fields: Any) -> tuple[int, dict[str, str], bytes]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "private words"}], **fields}
        return await self.post(body, {"authorization": f"Bearer {self.client_key}"})

    async def ask(self, method: str, path: str, json: Any = None, **headers: str) -> tuple[int, Any]:
        """Of the console's API, with the admin's key unless ``headers`` has others."""
        sent = headers or {"authorization": f"Bearer {self.admin_key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.admin_url}/console/api{path}", json=json, headers=sent) as answer,
        ):
            return answer.status, await answer.json()

    async def nth(self, number: int) -> str:
        """The path of one request, counted from 1 in the order in which they ended."""
        _, told = await self.ask("GET", "/requests")
        return f"/requests/{told['requests'][number - 1]['request_id']}"

    async def session(self) -> dict[str, str]:
        """Headers of a browser in which somebody has signed in."""
        headers = {"authorization": f"Bearer {self.admin_key}", SAME_PAGE[0]: SAME_PAGE[1]}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.admin_url}/console/api/session", headers=headers) as answer,
        ):
            assert answer.status == 200
            (token,) = re.findall(r"guard_console=([^;]+)", answer.headers["set-cookie"])
        return {"cookie": f"guard_console={token}", SAME_PAGE[0]: SAME_PAGE[1]}


StartConsole = Callable[..., AbstractAsyncContextManager[Console]]


@pytest.fixture
def start_console(tmp_path: Path) -> StartConsole:
    """Starts both ports in front of ``engine``, with two policies: ``test``, the default, and ``second``."""
    write_probe(tmp_path / "model_configs" / "probe")
    policies = tmp_path / "policies"
    policies.mkdir()

    @asynccontextmanager
    async def start(engine: FakeEngine, policy: str = POLICY, **settings: Any) -> AsyncIterator[Console]:
        (policies / "test.yaml").write_text(policy)
        (policies / "second.yaml").write_text(SECOND)
        (policies / "selection.yaml").write_text("version: 1\ndefault: test\nfor_keys: [second]\n")
        keys = tmp_path / "keys.yaml"
        admin, _ = create_key(keys, NewKey(admin=True))
        client, _ = create_key(keys, NewKey(tenant="acme"))
        given = {
            "upstream": engine.url,
            "policy": policies,
            "config_key": "tiny",
            "model_configs": tmp_path / "model_configs",
            "ledger": tmp_path / "ledger.jsonl",
            "keys": keys,
            "admin_port": 1,
        }
        services = Services(Settings(**(given | settings)))
        stopping, malformed = Stopping(limit_s=1), services.metrics.count_malformed
        with listening_socket("127.0.0.1", 0) as port, listening_socket("127.0.0.1", 0) as admin_port:
            async with (
                serving(operators_app(services), admin_port, on_malformed=malformed, stopping=stopping),
                serving(application(services), port, on_malformed=malformed, stopping=stopping),
            ):
                urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in (port, admin_port)]
                yield Console(urls[0], engine, tmp_path / "ledger.jsonl", urls[1], admin, client, services)

    return start


@pytest.fixture
async def console(start_console: StartConsole) -> AsyncIterator[Console]:
    async with running(FakeEngine()) as engine, start_console(engine) as console:
        yield console
