"""Several vLLM servers: requests that begin alike go to the same one, and one that is down costs nobody an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.machine import free_port
from guard.proxy.replicas import LOAD_FACTOR, Replicas, affinity_of
from tests.proxy.conftest import BODY, StartProxy, eventually
from tests.proxy.engine import FakeEngine, running


def chat(system: str, user: str = "hello") -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "tiny", "messages": messages}


@contextlib.asynccontextmanager
async def several(count: int, **faults: Any) -> AsyncIterator[list[FakeEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running(FakeEngine(**faults))) for _ in range(count)]


def urls(engines: list[FakeEngine]) -> str:
    return ",".join(engine.url for engine in engines)


async def test_requests_that_begin_alike_go_to_one_server_and_others_spread(start_proxy: StartProxy) -> None:
    async with several(3) as engines, start_proxy(engines[0], upstream=urls(engines)) as proxy:
        for prompt in range(12):
            for turn in range(2):
                assert (await proxy.post(chat(f"You are assistant {prompt}.", f"question {turn}")))[0] == 200
        begins = [{body["messages"][0]["content"] for body in engine.bodies} for engine in engines]
    assert sum(len(one) for one in begins) == 12
    assert all(begins)


async def test_a_server_that_is_down_costs_nobody_an_answer_and_is_used_again_when_it_is_back(
    start_proxy: StartProxy,
) -> None:
    port = free_port()
    lost = FakeEngine(url=f"http://127.0.0.1:{port}")
    async with several(1) as engines, start_proxy(lost, upstream=urls([*engines, lost])) as proxy:
        answers = await asyncio.gather(*(proxy.post(chat(f"Prompt {i}")) for i in range(8)))
        assert {status for status, _, _ in answers} == {200}
        ready = json.loads((await proxy.get("/readyz"))[2])
        assert (ready["status"], ready["engines"]) == ("ok", {"healthy": 1, "of": 2})
        async with running(lost, port):
            assert json.loads((await proxy.get("/readyz"))[2])["engines"]["healthy"] == 2
            for i in range(8):
                assert (await proxy.post(chat(f"Prompt {i}")))[0] == 200
            assert lost.bodies


async def test_a_request_that_may_have_been_read_is_not_sent_to_another_server(start_proxy: StartProxy) -> None:
    async with (
        several(2, break_after_words=0, event="missing") as engines,
        start_proxy(engines[0], upstream=urls(engines)) as proxy,
    ):
        status, _, body = await proxy.post({**BODY, "stream": True})
        assert status == 502 or b"upstream_unavailable" in body
        assert sum(len(engine.bodies) for engine in engines) == 1


async def test_with_no_server_left_the_answer_is_a_502_and_readyz_a_503(start_proxy: StartProxy) -> None:
    down = ",".join(f"http://127.0.0.1:{free_port()}" for _ in range(2))
    async with start_proxy(FakeEngine(), upstream=down) as proxy:
        status, _, body = await proxy.post()
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unavailable")
        assert "127.0.0.1" not in body.decode()
        status, _, body = await proxy.get("/readyz")
        assert (status, json.loads(body)["engines"]) == (503, {"healthy": 0, "of": 2})


async def test_one_prompt_that_everybody_has_does_not_put_all_work_on_one_server(start_proxy: StartProxy) -> None:
    async with (
        several(2, answer_delay_s=None) as engines,
        start_proxy(engines[0], upstream=urls(engines)) as proxy,
    ):
        held = [asyncio.create_task(proxy.post({**chat("The same."), "stream": True})) for _ in range(10)]
        await eventually(lambda: sum(engine.open for engine in engines) == 10)
        assert max(engine.open for engine in engines) <= 7
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await eventually(lambda: sum(engine.open for engine in engines) == 0)


@given(st.integers(2, 6), st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=40))
def test_no_server_has_more_than_its_share_of_work(count: int, requests: list[bytes]) -> None:
    replicas = Replicas([f"http://{i}" for i in range(count)])
    for affinity in requests:
        replicas.in_order(affinity)[0].in_flight += 1
    most = max(one.in_flight for one in replicas.all)
    assert most <= LOAD_FACTOR * len(requests) / count + 1


def test_losing_a_server_moves_only_its_own_requests() -> None:
    replicas = Replicas([f"http://{i}" for i in range(4)])
    before = {i: replicas.in_order(bytes([i]))[0] for i in range(64)}
    replicas.all[0].healthy = False
    after = {i: replicas.in_order(bytes([i]))[0] for i in range(64)}
    moved = {i for i in before if before[i] is not after[i]}
    assert moved == {i for i in before if before[i] is replicas.all[0]}
    assert len(Counter(one.url for one in after.values())) == 3


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (chat("a", "x"), chat("a", "y"), True),
        (chat("a"), chat("b"), False),
        (chat("a"), {**chat("a"), "model": "other"}, False),
        ({"prompt": "a"}, {"prompt": "a", "n": 2}, True),
        ({"input": ["a", "b"]}, {"input": ["a", "c"]}, True),
        ({"system": "a", "messages": [{"content": "x"}]}, {"system": "a", "messages": [{"content": "y"}]}, True),
        ({"messages": [{"content": [{"text": "a"}]}]}, {"messages": [{"content": [{"text": "b"}]}]}, False),
        ({"messages": [{"content": "\ud800"}]}, {"messages": [{"content": None}]}, False),
        ({"input": [[1, 2]]}, {}, False),
    ],
)
def test_prompts_that_begin_alike_have_the_same_affinity(
    one: dict[str, Any], other: dict[str, Any], alike: bool
) -> None:
    assert (affinity_of(one) == affinity_of(other)) == alike
