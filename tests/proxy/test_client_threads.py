"""What one client's texts take of the guard, and what stays for others and for the guard itself."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from detectors import registry
from detectors.base import Score
from guard.proxy import client_threads
from guard.proxy.client_threads import LONG_THREADS, SHORT_CHARACTERS, SHORT_THREADS
from tests.proxy.conftest import StartProxy, eventually
from tests.proxy.detectors import register
from tests.proxy.engine import FakeEngine, running

POLICY = """\
version: 1
name: test
prompt_timeout_s: 20
detectors:
  text: {kind: sticky}
rules:
  - {name: leak, when: {detector: text, at_least: 0.5}, action: block, on_error: flag}
"""
LONG = "x" * (SHORT_CHARACTERS + 1)
ANNA, BERT = ({"authorization": f"Bearer {one}"} for one in ("anna", "bert"))
HASHES = tuple(hashlib.sha256(one.encode()).hexdigest() for one in ("anna", "bert"))


@dataclass
class Sticky:
    """1 where a text has ``secret``. Hangs in a text with ``hang`` until it is let go, as somebody else's may."""

    kind: str = "sticky"
    thresholds: Mapping[str, float] = field(default_factory=dict)
    let_go: threading.Event = field(default_factory=threading.Event)
    reads: list[str] = field(default_factory=list)

    def score_text(self, text: str) -> Score:
        self.reads.append(text)
        if "hang" in text:
            self.let_go.wait(60)
        if "slow" in text:
            time.sleep(0.5)
        if "linger" in text:
            time.sleep(1.3)
        return Score("scored", float("secret" in text))


@pytest.fixture
def sticky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sticky]:
    register(monkeypatch)
    detector = Sticky()
    monkeypatch.setitem(registry.BUILT_IN, "sticky", lambda _path: detector)
    yield detector
    detector.let_go.set()


def body(text: str) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("text", "count"), [("hang", SHORT_THREADS), ("hang" + LONG, LONG_THREADS)], ids=["short", "long"]
)
async def test_one_clients_texts_keep_nobody_elses_waiting(
    start_proxy: StartProxy, sticky: Sticky, text: str, count: int
) -> None:
    async with (
        running(FakeEngine()) as engine,
        start_proxy(engine, POLICY, api_key_hashes=HASHES) as proxy,
        asyncio.TaskGroup() as flood,
    ):
        for _ in range(4 * count):
            flood.create_task(proxy.post(body(text), ANNA))
        await eventually(lambda: len(sticky.reads) == count // 2)
        async with asyncio.timeout(10):
            for harmful in (f"a secret{text[4:]}", "a secret"):
                assert (await proxy.post(body(harmful), BERT))[0] == 400
        assert sum("hang" in one for one in sticky.reads) == count // 2
        sticky.let_go.set()


async def test_short_texts_do_not_wait_for_long_ones_of_the_same_client(
    start_proxy: StartProxy, sticky: Sticky
) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, POLICY) as proxy, asyncio.TaskGroup() as flood:
        for _ in range(4 * LONG_THREADS):
            flood.create_task(proxy.post(body("hang" + LONG)))
        await eventually(lambda: len(sticky.reads) == 1)
        async with asyncio.timeout(10):
            assert (await proxy.post(body("a secret")))[0] == 400
        sticky.let_go.set()


async def test_policies_change_whatever_texts_clients_send(
    start_proxy: StartProxy, sticky: Sticky, tmp_path: Path
) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, POLICY) as proxy, asyncio.TaskGroup() as flood:
        for text in ["hang"] * 40 + ["hang" + LONG] * 8:
            flood.create_task(proxy.post(body(text)))
        await eventually(lambda: len(sticky.reads) == SHORT_THREADS // 2 + LONG_THREADS // 2)
        (tmp_path / "policy.yaml").write_text(POLICY.replace("name: test", "name: other"))
        async with asyncio.timeout(5):
            while b'"policy":"other@' not in (await proxy.get("/readyz"))[2]:
                await asyncio.sleep(0.05)
            assert b"guard_policy_reloads" in (await proxy.get("/metrics"))[2]
        sticky.let_go.set()


async def test_a_reading_that_is_too_late_is_not_gone_on_with(start_proxy: StartProxy, sticky: Sticky) -> None:
    hurried = POLICY.replace("prompt_timeout_s: 20", "prompt_timeout_s: 0.1")
    async with running(FakeEngine()) as engine, start_proxy(engine, hurried) as proxy:
        # Two parts that a template may join, and each text with another reading: four to score.
        parts = [{"type": "text", "text": "sl\u00f3w slow"}, {"type": "text", "text": "b\u00e9side"}]
        status, headers, _ = await proxy.post({"model": "tiny", "messages": [{"role": "user", "content": parts}]})
        assert (status, headers["x-guard-action"]) == (200, "flag")
        await asyncio.sleep(1.2)
        assert len(sticky.reads) == 1


async def test_texts_that_wait_behind_a_detector_that_hangs_are_late_and_forgotten(
    start_proxy: StartProxy, sticky: Sticky
) -> None:
    hurried = POLICY.replace("prompt_timeout_s: 20", "prompt_timeout_s: 0.3")
    async with running(FakeEngine()) as engine, start_proxy(engine, hurried) as proxy:
        answers = await asyncio.gather(*(proxy.post(body(f"hang {i}")) for i in range(2 * SHORT_THREADS)))
        assert {headers["x-guard-action"] for _, headers, _ in answers} == {"flag"}
        sticky.let_go.set()
        assert (await proxy.post(body("a secret")))[0] == 400
        # Its share, and as many again in the place of those that hung.
        assert sum("hang" in one for one in sticky.reads) == SHORT_THREADS


async def test_a_client_that_sends_much_at_once_makes_none_of_its_texts_late(
    start_proxy: StartProxy, sticky: Sticky
) -> None:
    """Each takes half a second of the second that it has, and one is read after the other."""
    async with running(FakeEngine()) as engine:
        hurried = POLICY.replace("prompt_timeout_s: 20", "prompt_timeout_s: 1")
        async with start_proxy(engine, hurried) as proxy:
            answers = await asyncio.gather(*(proxy.post(body(f"slow {LONG} secret {i}")) for i in range(5)))
    assert [status for status, _, _ in answers] == [400] * 5
    assert not engine.bodies


@pytest.mark.parametrize(
    ("constant", "value", "status", "code"),
    [("LONG_WAITING", 2, 429, "too_many_texts"), ("MAX_WAIT_S", 0.6, 503, "texts_wait")],
)
async def test_what_gets_no_turn_is_refused_and_not_passed_unread(
    start_proxy: StartProxy,
    sticky: Sticky,
    monkeypatch: pytest.MonkeyPatch,
    constant: str,
    value: float,
    status: int,
    code: str,
) -> None:
    monkeypatch.setattr(client_threads, constant, value)
    async with running(FakeEngine()) as engine, start_proxy(engine, POLICY) as proxy:
        answers = await asyncio.gather(*(proxy.post(body(f"slow {LONG} secret {i}")) for i in range(6)))
        told = [json.loads(raw)["error"]["code"] for _, _, raw in answers]
        assert set(told) == {"content_filter", code}
        assert {found for found, _, raw in answers if code in raw.decode()} == {status}
        assert all("retry-after" in headers for _, headers, raw in answers if code in raw.decode())
        entries = await proxy.entries(6)
        assert sorted(entry["outcome"] for entry in entries) == sorted(
            "refused" if one == code else "blocked" for one in told
        )
        assert (await proxy.post(body("a secret")))[0] == 400
        assert not engine.bodies


BOTH = """\
version: 1
name: both
prompt_timeout_s: 1
detectors:
  text: {kind: sticky}
  words: {kind: words}
rules:
  - {name: hangs, when: {detector: text, at_least: 0.5}, action: flag, on_error: allow}
  - {name: leak, when: {detector: words, at_least: 0.5}, action: block, on_error: flag}
  - {name: said, stage: output, when: {detector: words, at_least: 0.5}, action: block, on_error: flag}
  - {name: hung, stage: output, when: {detector: text, at_least: 0.5}, action: flag, on_error: allow}
"""


@pytest.mark.parametrize("size", ["", LONG], ids=["short", "long"])
async def test_a_detector_that_hangs_costs_the_others_nothing(
    start_proxy: StartProxy, sticky: Sticky, size: str
) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, BOTH) as proxy:
        answers = await asyncio.gather(*(proxy.post(body(f"hang {size} secret {i}")) for i in range(2)))
        assert {headers["x-guard-rules"] for _, headers, _ in answers} == {"leak"}
        assert {status for status, _, _ in answers} == {400}
        engine.body = engine.whole(f"hang {size} secret")
        status, headers, _ = await proxy.post(body("fine"))
        assert (status, headers["x-guard-rules"]) == (400, "said")
        entries = await proxy.entries(3)
        assert {one["detectors"]["text"] for one in entries[:2]} == {"unavailable: the text was not read in time"}
        assert entries[2]["answer"]["scores"] == {"words": 1.0, "text": None}


SHADOW = BOTH.replace("name: both", "name: beside").replace("prompt_timeout_s: 1", "prompt_timeout_s: 20")
ASSIGN = "{version: 1, default: live, shadow: beside}"


@pytest.mark.parametrize("mode", ["another policy", "the same policy"])
async def test_what_nobody_acts_on_holds_nothing_and_is_recorded_when_it_comes(
    start_proxy: StartProxy, sticky: Sticky, tmp_path: Path, mode: str
) -> None:
    live = SHADOW.replace("name: beside", "name: live")
    if mode == "the same policy":
        live = live.replace("{detector: text, at_least: 0.5}, ", "{detector: text, at_least: 0.5}, mode: shadow, ")
    else:
        live = "\n".join(line for line in live.split("\n") if "text" not in line)
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "live.yaml").write_text(live)
    (folder / "beside.yaml").write_text(SHADOW)
    (folder / "selection.yaml").write_text(ASSIGN)
    async with running(FakeEngine()) as engine, start_proxy(engine, path=folder) as proxy:
        async with asyncio.timeout(5):
            assert (await proxy.post(body("hang secret")))[0] == 400
        async with asyncio.timeout(5):
            assert (await proxy.post(body("hang")))[0] == 200
        engine.body = engine.whole("hang secret")
        async with asyncio.timeout(5):
            assert (await proxy.post(body("fine")))[1]["x-guard-rules"] == "said"
        entries = await proxy.entries(3)
        late = "unavailable: the text was not read in time"
        assert {one["shadow"]["detectors"]["text"] for one in entries} == {late}
        assert entries[2]["answer"]["shadow"]["detectors"]["text"] == late
        sticky.let_go.set()
        engine.body = engine.whole("linger secret")
        async with asyncio.timeout(1.2):
            assert (await proxy.post(body("fine")))[1]["x-guard-rules"] == "said"
        entry = (await proxy.entries(4))[-1]
        assert entry["answer"]["shadow"]["scores"]["text"] == 1.0
        assert entry["shadow"]["scores"]["text"] == 0.0
        if mode == "the same policy":
            assert entry["answer"]["scores"]["text"] == 1.0
            assert {"rule": "hung", "action": "flag", "mode": "shadow"}.items() <= entry["hits"][-1].items()
