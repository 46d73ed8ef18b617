"""Limits of keys and tenants: who is over one gets a 429 that says when to come back, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, RateLimitError

from guard.machine import free_port
from guard.proxy.keys import Limits, NewKey, create_key
from guard.proxy.limits import Account, Exceeded, LocalLimits, Scope
from tests.proxy.conftest import BODY, Proxy, StartProxy, eventually
from tests.proxy.engine import FakeEngine, running

STREAM = {**BODY, "stream": True}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def limited(file: Path, **limits: Any) -> str:
    return create_key(file, NewKey(limits=Limits(**limits)))[0]


async def test_over_its_rate_a_key_gets_a_429_with_the_time_to_wait_and_others_go_on(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    slow, other = limited(file, requests_per_s=0.5), limited(file, requests_per_s=0.5)
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        assert (await proxy.post(headers=bearer(slow)))[0] == 200
        status, headers, body = await proxy.post(headers=bearer(slow))
        error = json.loads(body)["error"]
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert headers["retry-after"] == "2"
        assert 1000 < int(headers["retry-after-ms"]) <= 2000
        assert "x-should-retry" not in headers
        assert (await proxy.post(headers=bearer(other)))[0] == 200
        assert len(engine.bodies) == 2
        entries = await proxy.entries(3)
    assert [(entry["outcome"], entry["status"]) for entry in entries] == [
        ("completed", 200),
        ("refused", 429),
        ("completed", 200),
    ]


async def test_openais_client_waits_as_it_is_told_and_then_succeeds(start_proxy: StartProxy, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = limited(file, requests_per_s=2)
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        async with AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=2) as client:
            began_s = time.monotonic()
            for _ in range(4):
                await client.chat.completions.create(**BODY)  # type: ignore[call-overload]
            assert time.monotonic() - began_s > 0.8
        assert len(engine.bodies) == 4
        async with AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(RateLimitError):
                await asyncio.gather(*(client.chat.completions.create(**BODY) for _ in range(4)))  # type: ignore[call-overload]


async def test_tokens_are_counted_after_the_answer_and_their_debt_is_waited_for(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    key = limited(file, tokens_per_min=20)
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        # The engine's answers use 12 tokens: 20, then 8, then -4.
        for _ in range(2):
            assert (await proxy.post(headers=bearer(key)))[0] == 200
        status, headers, body = await proxy.post(headers=bearer(key))
        assert status == 429
        assert 10 <= int(headers["retry-after"]) <= 15
        assert "20 tokens a minute" in json.loads(body)["error"]["message"]


async def test_a_stream_counts_though_it_tells_no_usage_and_though_its_client_leaves(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    whole, left = limited(file, tokens_per_min=12), limited(file, tokens_per_min=9)
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        # 7 tokens of the prompt, 5 words and the end.
        assert (await proxy.post(STREAM, bearer(whole)))[0] == 200
        assert (await proxy.post(STREAM, bearer(whole)))[0] == 429
        engine.answer_delay_s = None
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{proxy.url}/v1/chat/completions", json=STREAM, headers=bearer(left)) as answer,
        ):
            await answer.content.readuntil(b'"."')
        await eventually(lambda: engine.open == 0)
        await asyncio.sleep(0.05)
        assert (await proxy.post(STREAM, bearer(left)))[0] == 429


async def test_a_tenants_cap_counts_all_of_its_keys_and_is_free_again_when_a_client_leaves(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("version: 1\ntenants:\n  acme: {limits: {concurrent: 2}}\n")
    one, two = (create_key(file, NewKey(tenant="acme"))[0] for _ in range(2))
    other = create_key(file, NewKey(tenant="other"))[0]
    async with running(FakeEngine(answer_delay_s=None)) as engine, start_proxy(engine, keys=file) as proxy:
        held = [asyncio.create_task(proxy.post(STREAM, bearer(key))) for key in (one, two)]
        await eventually(lambda: engine.open == 2)
        status, headers, _ = await proxy.post(headers=bearer(one))
        assert (status, headers["retry-after"]) == (429, "1")
        reached = asyncio.create_task(proxy.post(STREAM, bearer(other)))
        await eventually(lambda: engine.open == 3)
        held[0].cancel()
        await eventually(lambda: engine.open == 2)
        held.append(asyncio.create_task(proxy.post(STREAM, bearer(two))))
        await eventually(lambda: engine.open == 3)
        for task in (*held, reached):
            task.cancel()
        await asyncio.gather(*held, reached, return_exceptions=True)


async def test_with_too_many_requests_under_way_the_next_is_a_503_that_says_when(start_proxy: StartProxy) -> None:
    engine = FakeEngine(answer_delay_s=None)
    async with running(engine), start_proxy(engine, max_concurrent=1) as proxy:
        held = asyncio.create_task(proxy.post(STREAM))
        await eventually(lambda: engine.open == 1)
        status, headers, body = await proxy.post()
        assert (status, json.loads(body)["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await eventually(lambda: engine.open == 0)
        engine.answer_delay_s = 0
        await asyncio.sleep(0.05)
        assert (await proxy.post())[0] == 200


async def test_many_at_once_are_admitted_exactly_as_often_as_allowed(start_proxy: StartProxy, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = limited(file, tokens_per_min=1_000_000, requests_per_s=0.01)
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        answers = await asyncio.gather(*(proxy.post(headers=bearer(key)) for _ in range(20)))
    assert sorted(status for status, _, _ in answers) == [200] + [429] * 19


@given(st.floats(0.1, 50), st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3)), max_size=40), st.integers(1, 3))
def test_a_bucket_never_admits_more_than_its_burst_and_the_time_since(
    rate: float, steps: list[tuple[float, int]], cap: int
) -> None:
    now = [0.0]
    limits = LocalLimits(clock=lambda: now[0])
    scope = Scope("key:a", Limits(requests_per_s=rate, concurrent=cap))
    admitted = under_way = 0
    for wait_s, requests in steps:
        now[0] += wait_s
        for _ in range(requests):
            if limits.admit([scope]) is None:
                admitted += 1
                under_way += 1
        assert admitted <= max(1.0, rate) + now[0] * rate + 1e-6
        assert under_way <= cap
        if under_way:
            limits.release([scope], 0)
            under_way -= 1


def test_after_the_time_it_was_told_a_request_is_admitted() -> None:
    now = [100.0]
    limits = LocalLimits(clock=lambda: now[0])
    scopes = [Scope("key:a", Limits(tokens_per_min=60)), Scope("tenant:t", Limits(requests_per_s=3))]
    assert limits.admit(scopes) is None
    limits.release(scopes, 100)
    refused = limits.admit(scopes)
    assert refused is not None
    assert (refused.what, refused.retry_s) == ("tokens", pytest.approx(41))
    now[0] += 40.9
    assert limits.admit(scopes) is not None
    now[0] += 0.11
    assert limits.admit(scopes) is None


def test_a_scope_that_refuses_costs_the_others_nothing() -> None:
    limits = LocalLimits(clock=lambda: 0.0)
    full, shut = Scope("tenant:t", Limits(requests_per_s=1)), Scope("key:a", Limits(requests_per_s=1))
    assert limits.admit([shut]) is None
    assert limits.admit([full, shut]) is not None
    assert limits.admit([full]) is None


def test_a_limit_that_is_new_starts_full() -> None:
    account = Account()
    account.fill(Limits(), 5.0)
    account.fill(Limits(requests_per_s=2), 6.0)
    assert account.requests == 2


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy must not look like a Redis that is gone."""
    _need_client()
    monkeypatch.setattr("guard.proxy.shared_limits.REDIS_TIMEOUT_S", 5.0)


def _need_client() -> None:
    pytest.importorskip("redis", reason="needs the client: pip install 'mia-guard[redis]'")


@contextlib.asynccontextmanager
async def redis_server(folder: Path, port: int) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Debian's redis-server on loopback, without files."""
    _need_client()
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server, which .ci/run installs as root on Debian: apt-get install redis-server")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with (folder / "redis.log").open("ab") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log)  # noqa: ASYNC220 - starts at once
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    break
        yield process
    finally:
        process.terminate()
        process.wait(5)


@contextlib.asynccontextmanager
async def replicas(
    start_proxy: StartProxy, engine: FakeEngine, file: Path, port: int
) -> AsyncIterator[tuple[Proxy, Proxy]]:
    _need_client()
    url = f"redis://127.0.0.1:{port}/0"
    async with (
        start_proxy(engine, keys=file, redis_url=url) as one,
        start_proxy(engine, keys=file, redis_url=url) as two,
    ):
        yield one, two


@pytest.mark.usefixtures("_patient")
async def test_replicas_that_share_redis_admit_together_what_one_would(start_proxy: StartProxy, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    rate, tokens = limited(file, requests_per_s=0.01), limited(file, tokens_per_min=20)
    port, engine = free_port(), FakeEngine()
    async with redis_server(tmp_path, port), running(engine), replicas(start_proxy, engine, file, port) as both:
        answers = await asyncio.gather(*(proxy.post(headers=bearer(rate)) for proxy in both * 5))
        assert sorted(status for status, _, _ in answers) == [200] + [429] * 9
        for proxy in both:
            assert (await proxy.post(headers=bearer(tokens)))[0] == 200
            await asyncio.sleep(0.1)
        for proxy in both:
            status, headers, _ = await proxy.post(headers=bearer(tokens))
            assert status == 429
            assert 10 <= int(headers["retry-after"]) <= 15
        assert json.loads((await both[0].get("/readyz"))[2])["limits"] == "shared"


@pytest.mark.usefixtures("_patient")
async def test_a_cap_is_shared_and_each_end_of_a_request_gives_its_place_back(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    key = limited(file, concurrent=1)
    port, engine = free_port(), FakeEngine(answer_delay_s=None)
    async with redis_server(tmp_path, port), running(engine), replicas(start_proxy, engine, file, port) as (one, two):
        held = asyncio.create_task(one.post(STREAM, bearer(key)))
        await eventually(lambda: engine.open == 1)
        assert (await two.post(headers=bearer(key)))[0] == 429
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await eventually(lambda: engine.open == 0)
        engine.answer_delay_s = 0
        await asyncio.sleep(0.1)
        assert (await two.post(headers=bearer(key)))[0] == 200


async def test_without_redis_each_replica_counts_for_itself_and_says_so_and_returns_to_it(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    key = limited(file, requests_per_s=0.01)
    port, engine = free_port(), FakeEngine()
    async with running(engine), replicas(start_proxy, engine, file, port) as both:
        assert [(await proxy.post(headers=bearer(key)))[0] for proxy in both * 2] == [200, 200, 429, 429]
        assert json.loads((await both[0].get("/readyz"))[2])["limits"] == "degraded"
        async with redis_server(tmp_path, port):
            await asyncio.sleep(1.1)
            assert [(await proxy.post(headers=bearer(key)))[0] for proxy in both] == [200, 429]
            assert json.loads((await both[0].get("/readyz"))[2])["limits"] == "shared"


async def test_what_readyz_says_of_limits_is_asked_before_any_traffic_and_in_every_process(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    key = limited(file, requests_per_s=100)
    port, engine = free_port(), FakeEngine()

    async def said(proxy: Proxy) -> str:
        return str(json.loads((await proxy.get("/readyz"))[2])["limits"])

    async def becomes(proxy: Proxy, status: str) -> None:
        async with asyncio.timeout(20):
            while await said(proxy) != status:
                await asyncio.sleep(0.1)

    async with running(engine), replicas(start_proxy, engine, file, port) as both:
        assert [await said(proxy) for proxy in both] == ["degraded"] * 2
        async with redis_server(tmp_path, port):
            for proxy in both:
                await becomes(proxy, "shared")
            assert (await both[0].post(headers=bearer(key)))[0] == 200
        for proxy in both:
            await becomes(proxy, "degraded")


@pytest.mark.parametrize("refusal", [("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")])
async def test_a_redis_that_answers_and_does_not_count_is_no_shared_one(
    start_proxy: StartProxy, tmp_path: Path, refusal: tuple[str, str, str]
) -> None:
    name, refusing, counting = refusal
    port, engine = free_port(), FakeEngine()
    key = limited(tmp_path / "keys.yaml", requests_per_s=100)

    async with redis_server(tmp_path, port), running(engine):
        from redis.asyncio import Redis

        async with replicas(start_proxy, engine, tmp_path / "keys.yaml", port) as (proxy, _):
            redis = Redis(port=port)
            for value, status in ((counting, "shared"), (refusing, "degraded"), (counting, "shared")):
                await redis.config_set(name, value)
                async with asyncio.timeout(20):
                    while json.loads((await proxy.get("/readyz"))[2])["limits"] != status:
                        await asyncio.sleep(0.1)
                assert (await proxy.post(headers=bearer(key)))[0] == 200
            await redis.aclose()


@pytest.mark.usefixtures("_patient")
async def test_the_place_of_a_replica_that_died_is_free_again_when_its_lease_runs_out(tmp_path: Path) -> None:
    port = free_port()
    async with redis_server(tmp_path, port):
        from guard.proxy.shared_limits import SharedLimits

        url, scopes = f"redis://127.0.0.1:{port}/0", [Scope("key:a", Limits(concurrent=1))]
        died, kept, other = SharedLimits(url, 1.5), SharedLimits(url, 1.5), SharedLimits(url, 1.5)
        renewing = asyncio.create_task(kept.renew())
        try:
            assert await died.admit("lease-1", scopes) is None
            assert await other.admit("lease-2", scopes) is not None
            await asyncio.sleep(1.7)
            assert await kept.admit("lease-3", scopes) is None
            await asyncio.sleep(2.2)
            refused = await other.admit("lease-4", scopes)
            assert refused is not None
            assert refused.what == "concurrent"
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            for one in (died, kept, other):
                await one.close()


async def test_a_redis_that_hung_and_does_late_what_it_was_asked_keeps_no_place_taken(tmp_path: Path) -> None:
    port = free_port()
    async with redis_server(tmp_path, port) as process:
        from guard.proxy.shared_limits import FAILURES, SharedLimits

        limits, scopes = SharedLimits(f"redis://127.0.0.1:{port}/0"), [Scope("key:a", Limits(concurrent=1))]

        async def admit() -> tuple[str, Exceeded | None]:
            """Again and again: a machine that is busy looks like a Redis that hangs."""
            async with asyncio.timeout(30):
                while True:
                    lease = next(leases)
                    with contextlib.suppress(*FAILURES):
                        return lease, await limits.admit(lease, scopes)
            raise AssertionError

        leases = (f"lease-{number}" for number in count())
        try:
            held, refused = await admit()
            assert refused is None
            for _ in range(3):
                process.send_signal(signal.SIGSTOP)
                await limits.release(held, scopes, 0)
                with pytest.raises(FAILURES):
                    await limits.admit(next(leases), scopes)
                leaving = asyncio.create_task(limits.admit(next(leases), scopes))
                await asyncio.sleep(0.05)
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
                process.send_signal(signal.SIGCONT)
                held, refused = await admit()
                assert refused is None
            assert (await admit())[1] is not None
        finally:
            process.send_signal(signal.SIGCONT)
            await limits.close()
