"""Requests that would come back to the guard that sends them: refused at the start where that can be told, and at the
first return where it cannot."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from typer.testing import CliRunner

from guard.cli import app
from guard.machine import free_port
from guard.proxy.loops import MOST_GUARDS, own_among
from guard.proxy.upstream import CAPABILITIES
from tests.proxy.command import guard_proxy
from tests.proxy.conftest import BODY, StartProxy
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_endpoints import MESSAGES, RESPONSES, body_of

EVERYWHERE = str(ipaddress.IPv4Address(0))
OURS = "1.1 mia-guard-{:016x}"


class Middle:
    """A plain reverse proxy, as a load balancer is, to ``target``; ``seen``: paths that came by."""

    url = target = ""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def pass_on(self, request: web.Request) -> web.Response:
        if request.path == CAPABILITIES:
            # A guard asks by itself, now and then.
            raise web.HTTPNotFound
        self.seen.append(request.path)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, self.target + request.path, headers=headers, data=await request.read()
            ) as got,
        ):
            return web.Response(body=await got.read(), status=got.status, content_type=got.content_type)


@asynccontextmanager
async def middle() -> AsyncIterator[Middle]:
    between = Middle()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", between.pass_on)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    between.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield between
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "through another guard"])
async def test_a_request_that_comes_back_is_a_508_at_its_first_return(
    start_proxy: StartProxy, tmp_path: Path, others: int
) -> None:
    # Asked to read inside the model, another guard would refuse.
    plain: dict[str, Any] = {"upstream_plugin": not others}
    async with middle() as between, start_proxy(FakeEngine(), upstream=between.url, **plain) as proxy:
        second = start_proxy(FakeEngine(), upstream=proxy.url, ledger=tmp_path / "second.jsonl", **plain)
        async with second as other:
            between.target = other.url if others else proxy.url
            # More of the judged APIs than one: each has its way to relay an error.
            for path, body in (
                ("/v1/chat/completions", BODY),
                ("/v1/chat/completions", {**BODY, "stream": True}),
                (RESPONSES, body_of(RESPONSES, False)),
                (MESSAGES, body_of(MESSAGES, True)),
                ("/v1/embeddings", {"model": "tiny", "input": "hi"}),
            ):
                between.seen.clear()
                status, headers, raw = await proxy.post(body, path=path)
                error = json.loads(raw)["error"]
                assert (status, error["code"], headers["x-should-retry"]) == (508, "loop_detected", "false"), path
                assert between.seen == [path]
            between.seen.clear()
            assert (await proxy.get("/v1/models"))[0] == 508
            assert between.seen == ["/v1/models"]
            between.seen.clear()
            client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="unused", max_retries=2)
            with pytest.raises(openai.InternalServerError, match="comes back"):
                await client.chat.completions.create(model="tiny", messages=BODY["messages"])
            assert len(between.seen) == 1
    entries = map(json.loads, (tmp_path / "ledger.jsonl").read_text().splitlines())
    # The other guard asks which probes there are, and a guard has none.
    outcomes = {entry["outcome"] for entry in entries if entry["route"] != "other"}
    assert outcomes == {"upstream_unavailable"}


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "through another guard"])
async def test_a_guard_that_asks_itself_for_its_health_is_not_healthy(
    start_proxy: StartProxy, tmp_path: Path, others: int
) -> None:
    async with middle() as between, start_proxy(FakeEngine(), upstream=between.url) as proxy:
        second = start_proxy(FakeEngine(), upstream=proxy.url, ledger=tmp_path / "second.jsonl")
        async with second as other, asyncio.timeout(1.5):
            between.target = other.url if others else proxy.url
            status, _, raw = await proxy.get("/readyz")
            assert (status, json.loads(raw)["engines"]) == (503, {"healthy": 0, "of": 1})
            assert between.seen == ["/health"]


async def test_guards_one_behind_another_answer_and_tell_vllm_of_each_other_alone(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine) as inner:
        chained = start_proxy(engine, upstream=inner.url, upstream_plugin=False)
        async with chained as outer:
            status, _, _ = await outer.post(headers={"via": f"1.1 squid, {OURS.format(7)}, 1.0 <script>"})
            assert status == 200
            first, *between = engine.headers[-1]["via"].split(", ")
            assert first == OURS.format(7)
            assert len(set(between)) == 2
            assert all(one.startswith("1.1 mia-guard-") for one in between)
            chain = ", ".join(OURS.format(i) for i in range(MOST_GUARDS))
            assert (await outer.post(headers={"via": chain}))[0] == 508


@pytest.mark.parametrize(
    ("url", "host", "is_own"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1", True),
        ("http://localhost:8080", "127.0.0.1", True),
        ("http://LOCALHOST:8080/", "localhost", True),
        ("http://0.0.0.0:8080", "127.0.0.1", True),
        ("http://0.0.0.0:8080", EVERYWHERE, True),
        ("http://[::ffff:127.0.0.1]:8080", "127.0.0.1", True),
        ("http://127.1:8080", EVERYWHERE, True),
        ("http://[::1]:8080", "::1", True),
        ("http://[::]:8080", "::1", True),
        ("http://127.0.0.1:8080", "::", True),
        (f"http://{socket.gethostname()}:8080", EVERYWHERE, True),
        ("http://127.0.0.1:8001", "127.0.0.1", False),
        ("http://127.0.0.2:8080", "127.0.0.1", False),
        ("http://[::1]:8080", EVERYWHERE, False),
        ("http://192.0.2.7:8080", EVERYWHERE, False),
        ("http://no-such-host.invalid:8080", EVERYWHERE, False),
        ("http://127.0.0.1", "127.0.0.1", False),
    ],
)
def test_own_addresses_are_told_however_they_are_spelt(url: str, host: str, is_own: bool) -> None:
    assert own_among(["http://192.0.2.1:8000", url], host, 8080) == (url if is_own else None)


def test_the_default_ports_count() -> None:
    assert own_among(["http://127.0.0.1"], "127.0.0.1", 80)
    assert own_among(["https://localhost/"], "127.0.0.1", 443)


@pytest.mark.parametrize("pool", ["{own}", "http://192.0.2.1:8000,{own}"])
def test_a_start_with_an_own_address_is_refused_in_one_line(tmp_path: Path, pool: str) -> None:
    port = free_port()
    own = f"http://localhost:{port}"
    options = ["--port", str(port), "--upstream", pool.format(own=own), "--ledger", str(tmp_path / "ledger")]
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["proxy", *options])
    assert ended.exit_code == 1
    assert f"upstream (GUARD_UPSTREAM): {own} is where this proxy itself listens" in ended.output
    assert "ready: " not in ended.output


def test_so_is_a_provider_that_is_the_proxy_itself(tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "providers.yaml"
    base = f"http://127.0.0.1:{port}/v1"
    file.write_text(f"version: 1\nmodels: {{far: {{model: openai/far, api_base: {base!r}}}}}\n")
    options = ["--port", str(port), "--set", f"providers={file}", "--ledger", str(tmp_path / "ledger")]
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["proxy", *options])
    assert ended.exit_code == 1
    assert f"{file}: api_base: {base} is where this proxy itself listens" in ended.output


async def test_a_provider_that_leads_back_is_found_too(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAR_KEY", "key")
    file = tmp_path / "providers.yaml"
    async with middle() as between, running(FakeEngine()) as engine:
        far = f"{{model: openai/far, api_base: {between.url}/v1, api_key_env: FAR_KEY}}"
        file.write_text(f"version: 1\nmodels: {{far: {far}}}\n")
        async with start_proxy(engine, providers=file) as proxy:
            between.target = proxy.url
            status, _, raw = await proxy.post({**BODY, "model": "far"})
            assert (status, between.seen) == (508, ["/v1/chat/completions"])
            assert "through this guard before" in json.loads(raw)["error"]["message"]


async def test_worker_processes_of_one_guard_know_each_others_requests(tmp_path: Path) -> None:
    async with middle() as between:
        looped = guard_proxy(tmp_path, FakeEngine(url=between.url), "--workers", "2")
        async with looped as proxy:
            between.target = proxy.url
            for _ in range(8):
                # A connection each, so that both processes get some.
                post = aiohttp.request("POST", f"{proxy.url}/v1/chat/completions", json=BODY)
                async with post as answer:
                    assert answer.status == 508
            assert len(between.seen) == 8
