"""What requests did shows in ``/metrics``, as Prometheus reads it over HTTP."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from guard import __version__
from guard.proxy.keys import Limits, NewKey, create_key
from tests.proxy import detectors
from tests.proxy.command import guard_proxy
from tests.proxy.conftest import BLOCKED, BODY, IMPATIENT, POLICY, Proxy, StartProxy, eventually
from tests.proxy.engine import FakeEngine, running

CHAT = "/v1/chat/completions"
STREAM = {**BODY, "stream": True}
WORDS_POLICY = """\
version: 1
name: test
streaming: hold
detectors:
  words: {kind: words}
rules:
  - name: secrets
    stage: stream
    when: {detector: words, at_least: 0.5}
    action: redact
    redact: {replacement: "…"}
    on_error: allow
"""


async def value(proxy: Proxy, name: str, **labels: str) -> float:
    status, _, text = await proxy.get("/metrics")
    assert status == 200
    return value_in(text.decode(), name, **labels)


def value_in(text: str, name: str, **labels: str) -> float:
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    (found,) = [one.value for one in samples if one.name == name and one.labels == labels]
    return found


async def status_of(proxy: Proxy, status: str) -> float:
    return await value(proxy, "guard_detector_results_total", detector="danger", kind="probe", status=status)


async def test_a_score_has_a_time_and_one_that_is_missing_says_how(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, IMPATIENT) as proxy:
        assert (await proxy.post())[0] == 400
        assert await value(proxy, "guard_detector_seconds_count", detector="danger", kind="probe") == 1
        taken_s = await value(proxy, "guard_detector_seconds_sum", detector="danger", kind="probe")
        assert 0 < taken_s < 5
        engine.event = "dropped"
        await proxy.post()
        engine.event, engine.event_delay_s = "ok", 1.5
        await proxy.post()
        engine.event, engine.event_delay_s = "garbled", 0.0
        await proxy.post()
        found = {one: await status_of(proxy, one) for one in ("scored", "dropped", "late", "unavailable")}
    assert found == {"scored": 1, "dropped": 1, "late": 1, "unavailable": 1}


async def test_thresholds_in_force_are_those_of_the_policy(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine) as proxy:
        for rule, bound, threshold in (("stop", "at_least", 0.9), ("calm", "below", 0.9), ("watch", "at_least", 0.5)):
            labels = {"policy": "test", "rule": rule, "detector": "danger", "bound": bound}
            assert await value(proxy, "guard_rule_threshold", **labels) == threshold


async def test_how_long_a_judged_stream_was_kept_back_is_observed_and_an_unjudged_one_is_not(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    detectors.register(monkeypatch)
    slow = FakeEngine(word_delay_s=0.05)
    async with running(slow) as engine, start_proxy(engine, WORDS_POLICY) as proxy:
        assert (await proxy.post(STREAM))[0] == 200
        assert (await proxy.post())[0] == 200
        await proxy.entries(2)
        assert await value(proxy, "guard_stream_held_seconds_count", route=CHAT) == 1
        # Five words, the first of which waits for the last.
        assert await value(proxy, "guard_stream_held_seconds_sum", route=CHAT) > 0.15
    async with running(FakeEngine()) as engine, start_proxy(engine) as proxy:
        assert (await proxy.post(STREAM))[0] == 200
        assert await value(proxy, "guard_stream_held_seconds_count", route=CHAT) == 0


async def test_refusals_by_limits_say_whose_and_which(start_proxy: StartProxy, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = create_key(file, NewKey(limits=Limits(requests_per_s=0.1)))[0]
    bearer = {"authorization": f"Bearer {key}"}
    other = {"authorization": f"Bearer {create_key(file, NewKey())[0]}"}
    waiting = FakeEngine(event_delay_s=30.0)
    async with running(waiting) as engine, start_proxy(engine, keys=file, max_concurrent=1) as proxy:
        first = asyncio.create_task(proxy.post(headers=other))
        await eventually(lambda: waiting.open == 1)
        assert (await proxy.post(headers=other))[0] == 503
        first.cancel()
        await eventually(lambda: waiting.open == 0)
        waiting.event_delay_s = 0.0
        assert [(await proxy.post(headers=bearer))[0] for _ in range(2)] == [200, 429]
        assert await value(proxy, "guard_limit_refusals_total", scope="everybody", limit="concurrent") == 1
        assert await value(proxy, "guard_limit_refusals_total", scope="key", limit="requests") == 1
        assert await value(proxy, "guard_limit_refusals_total", scope="tenant", limit="requests") == 0


async def test_policy_files_that_cannot_be_used_show_until_they_can(start_proxy: StartProxy, tmp_path: Path) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine) as proxy:
        assert await value(proxy, "guard_policy_files_in_force") == 1
        for text, wanted in (("version: 1\nname: [\n", 0), (POLICY.replace("0.9}", "0.95}"), 1)):
            (tmp_path / "policy.yaml").write_text(text)
            async with asyncio.timeout(30):
                while await value(proxy, "guard_policy_files_in_force") != wanted:
                    await asyncio.sleep(0.1)
        labels = {"policy": "test", "rule": "stop", "detector": "danger", "bound": "at_least"}
        assert await value(proxy, "guard_rule_threshold", **labels) == 0.95
        hashes = re.findall(rb'^guard_policy_info\{hash="(\w+)"', (await proxy.get("/metrics"))[2], re.MULTILINE)
        assert len(hashes) == 1


async def test_whichever_worker_is_asked_it_tells_what_all_have_counted(tmp_path: Path) -> None:
    """Two real processes behind one port."""
    async with running(FakeEngine()) as engine, guard_proxy(tmp_path, engine, "--workers", "2") as proxy:

        async def fetch(session: aiohttp.ClientSession) -> str:
            async with session.get(f"{proxy.url}/metrics") as answer:
                assert answer.status == 200
                return await answer.text()

        # Connections of their own, which both processes take from the one socket.
        await asyncio.gather(*(proxy.ask("POST", CHAT, json=BODY) for _ in range(24)))
        completed = {"route": CHAT, "policy": "test", "action": "allow", "outcome": "completed"}
        for _ in range(8):
            async with aiohttp.ClientSession() as session:
                text = await fetch(session)
            assert value_in(text, "guard_requests_total", **completed) == 24
            assert value_in(text, "guard_detector_score_count", detector="danger", kind="probe") == 24
            assert value_in(text, "guard_requests_in_flight", route=CHAT) == 0
            assert value_in(text, "guard_policy_files_in_force") == 1
            assert value_in(text, "guard_build_info", version=__version__) == 1
