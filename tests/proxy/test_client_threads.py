"""What one client's texts take of the guard, and what stays for others and for the guard itself."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from detectors import registry
from detectors.base import Score
from guard.proxy.client_threads import LONG_THREADS, SHORT_CHARACTERS, SHORT_THREADS
from tests.proxy.conftest import StartProxy, eventually
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
        return Score("scored", float("secret" in text))


@pytest.fixture
def sticky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sticky]:
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


async def test_a_text_that_still_waits_is_forgotten_when_it_is_too_late(
    start_proxy: StartProxy, sticky: Sticky
) -> None:
    hurried = POLICY.replace("prompt_timeout_s: 20", "prompt_timeout_s: 0.3")
    async with running(FakeEngine()) as engine, start_proxy(engine, hurried) as proxy:
        answers = await asyncio.gather(*(proxy.post(body(f"hang {i}")) for i in range(2 * SHORT_THREADS)))
        assert {headers["x-guard-action"] for _, headers, _ in answers} == {"flag"}
        sticky.let_go.set()
        assert (await proxy.post(body("a secret")))[0] == 400
        assert sum("hang" in one for one in sticky.reads) == SHORT_THREADS // 2
