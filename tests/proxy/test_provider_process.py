"""The process that litellm runs in: what it does there stops nobody else, and it lives as long as its proxy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from guard.proxy import provider_process, provider_request
from guard.proxy.provider_worker import MEMORY_BYTES, WatchedThreads
from tests.processes import runs, started_by
from tests.proxy.command import guard_proxy
from tests.proxy.conftest import Proxy, StartProxy, eventually
from tests.proxy.engine import FakeEngine
from tests.proxy.far import KEY, MODELS, Far, chunk, far_away, stream
from tests.proxy.raw import raw_server
from tests.proxy.test_provider_answers import POLICY, asked, branching, said, with_schema
from tests.proxy.test_provider_asking import ANSWER, models_at, providers_file

pytest.importorskip("litellm", reason="needs litellm: pip install 'mia-guard[litellm]'")

WORKER = "guard.proxy.provider_worker"


def workers(process_id: int | None = None) -> list[psutil.Process]:
    return started_by(process_id, WORKER, recursive=True)


@pytest.fixture
def start(start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FAR_KEY", KEY)

    @asynccontextmanager
    async def start(models: dict[str, Any] | None = None) -> AsyncIterator[tuple[Proxy, Far, psutil.Process]]:
        async with far_away(tmp_path) as (far, path):
            if models is not None:
                providers_file(tmp_path, models)
            monkeypatch.setenv("HTTPS_PROXY", far.url)
            before = {one.pid for one in workers()}
            async with start_proxy(FakeEngine(), POLICY, upstream="", providers=path) as proxy:
                (worker,) = (one for one in workers() if one.pid not in before)
                yield proxy, far, worker

    return start


async def prompt_meanwhile(proxy: Proxy, asking: asyncio.Task[Any]) -> float:
    """Longest time that another request took, s."""
    longest_s = 0.0
    while not asking.done():
        began_s = time.perf_counter()
        assert (await proxy.get("/livez"))[0] == 200
        longest_s = max(longest_s, time.perf_counter() - began_s)
        await asyncio.sleep(0.02)
    return longest_s


async def test_it_is_one_of_few_secrets_and_answers_while_it_loads(start: Any) -> None:
    async with start() as (proxy, far, worker):
        far.frames = stream("hosted_vllm", "a", "b")
        asking = asyncio.create_task(asked(proxy, "hosted_vllm", stream=True))
        # Loading takes seconds, and nobody else waits for that.
        assert await prompt_meanwhile(proxy, asking) < 1
        assert asking.result()[0] == 200
        # No tokenizer was asked for anywhere, through the proxy that is set or past it.
        assert far.paths == ["/v1/chat/completions"]
        folder = Path(worker.cmdline()[-2]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert KEY not in " ".join(worker.cmdline())
        assert worker.rlimit(psutil.RLIMIT_DATA) == (MEMORY_BYTES, MEMORY_BYTES)
        # A client that leaves ends the provider's request, of a whole answer too.
        far.frames, far.hangs = [], True
        leaving = asyncio.create_task(asked(proxy, "hosted_vllm"))
        await eventually(lambda: far.open == 1)
        leaving.cancel()
        await eventually(lambda: far.open == 0)
    assert not runs(worker)
    assert not folder.exists()


async def test_one_that_does_not_answer_is_ended_and_another_takes_its_place(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_process, "PING_EVERY_S", 0.1)
    monkeypatch.setattr(provider_process, "PING_LIMIT_S", 0.5)
    monkeypatch.setattr(provider_process, "MISSED_PINGS", 2)
    async with start() as (proxy, far, worker):
        far.frames = stream("openai", "a")
        assert (await asked(proxy, "openai"))[0] != 503
        far.hangs = True
        lost = asyncio.create_task(asked(proxy, "openai", stream=True))
        await eventually(lambda: far.open == 1)
        worker.send_signal(signal.SIGSTOP)
        assert await prompt_meanwhile(proxy, lost) < 1
        status, headers, body = lost.result()
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (502, "1", "upstream_unavailable")
        far.hangs = False
        assert (await asked(proxy, "openai", stream=True))[0] == 200
        assert not runs(worker)
        outcomes = [one["outcome"] for one in await proxy.entries(3)]
    assert outcomes[1:] == ["upstream_unavailable", "completed"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGSEGV])
async def test_whatever_ends_it_ends_its_requests_at_once(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    monkeypatch.setattr(provider_process, "PING_EVERY_S", 0.1)
    monkeypatch.setattr(provider_process, "PING_LIMIT_S", 0.5)
    monkeypatch.setattr(provider_process, "MISSED_PINGS", 2)
    async with raw_server() as server, start(models_at(server.url, {"openai": MODELS["openai"]})) as (proxy, _, worker):
        server.stays = True
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        server.answer = head + b"".join(chunk(0, {"content": word}) for word in ("a ", "b "))
        streams = [asyncio.create_task(asked(proxy, "openai", stream=True)) for _ in range(3)]
        whole = asyncio.create_task(asked(proxy, "openai"))
        await eventually(lambda: server.open == 4, 60)
        await asyncio.sleep(1)
        worker.send_signal(number)
        async with asyncio.timeout(10):
            for status, _, body in await asyncio.gather(*streams):
                *frames, error = [json.loads(one.removeprefix("data: ")) for one in body.strip().split("\n\n")]
                assert (status, said(frames)) == (200, "a b ")
                assert error["error"]["code"] == "upstream_unavailable"
            status, headers, body = await whole
            assert (status, headers["retry-after"]) == (502, "1")
            assert json.loads(body)["error"]["message"] == provider_process.LOST
        entries = await proxy.entries(4)
    told = sorted((one["outcome"], one["tokens"]["completion"]) for one in entries)
    assert told == [*[("upstream_broken", None)] * 3, ("upstream_unavailable", 0)]


async def test_more_requests_than_it_takes_at_once_wait_and_are_answered(start: Any) -> None:
    async with start() as (proxy, far, worker):
        far.body = json.loads(ANSWER)
        assert (await asked(proxy, "openai"))[0] == 200
        worker.send_signal(signal.SIGSTOP)
        try:
            asking = [asyncio.create_task(asked(proxy, "openai")) for _ in range(300)]
            await asyncio.sleep(2)
        finally:
            worker.send_signal(signal.SIGCONT)
        assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}


async def test_readiness_waits_for_it(start: Any) -> None:
    async with start() as (proxy, far, worker):
        status, _, body = await proxy.get("/readyz")
        assert (status, json.loads(body)["providers"]) == (503, "starting")
        far.body = json.loads(ANSWER)
        assert (await asked(proxy, "openai"))[0] == 200
        status, _, body = await proxy.get("/readyz")
        assert (status, json.loads(body)["providers"]) == (200, "ok")
        worker.kill()
        async with asyncio.timeout(10):
            while (told := await proxy.get("/readyz"))[0] == 200:
                await asyncio.sleep(0.02)
        assert json.loads(told[2])["providers"] == "unavailable"
        # It is started again, and who asks meanwhile waits.
        assert (await asked(proxy, "openai"))[0] == 200
        assert (await proxy.get("/readyz"))[0] == 200


async def test_work_without_bound_has_an_end_and_stops_nobody_else(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the proxy did not know that such a schema is one."""
    monkeypatch.setattr(provider_request, "MAX_WRITTEN_OUT", 1 << 200)
    async with start() as (proxy, far, worker):
        far.body = b"<html>"
        assert (await asked(proxy, "gemini"))[0] == 502
        worker.rlimit(psutil.RLIMIT_DATA, (600 << 20, 600 << 20))
        asking = asyncio.create_task(asked(proxy, "gemini", **with_schema(branching(60))["tools"]))
        assert await prompt_meanwhile(proxy, asking) < 2
        assert asking.result()[0] in (400, 502)
        assert (await asked(proxy, "gemini"))[0] == 502
        assert far.paths != []


def test_work_in_a_thread_is_told_by_what_it_takes_of_the_processor() -> None:
    threads, ended = WatchedThreads(), threading.Event()

    def work() -> None:
        while not ended.is_set():
            sum(range(10_000))

    waiting = threads.submit(ended.wait)
    working = threads.submit(work)
    try:
        limit_s = time.monotonic() + 20
        while threads.longest_s() < 0.1:
            assert time.monotonic() < limit_s
            time.sleep(0.01)
    finally:
        ended.set()
    assert waiting.result()
    working.result()
    assert threads.longest_s() == 0


async def test_it_ends_with_a_proxy_that_is_killed_and_without_providers_there_is_none(tmp_path: Path) -> None:
    async with far_away(tmp_path) as (_, path):
        options = ("--set", f"providers={path}", "--upstream", "")
        async with guard_proxy(tmp_path, FakeEngine(), *options, FAR_KEY=KEY) as proxy:
            (worker,) = workers(proxy.process.pid)
            proxy.process.kill()
            await eventually(lambda: not runs(worker))
    async with guard_proxy(tmp_path, FakeEngine(url="http://127.0.0.1:1")) as proxy:
        assert workers(proxy.process.pid) == []


def test_no_process_of_the_proxy_itself_loads_litellm() -> None:
    loaded = "import guard.proxy_process, sys; sys.exit('litellm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], env=os.environ, check=False).returncode == 0
