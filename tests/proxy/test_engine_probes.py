"""An engine that was started with a detector's weights multiplies itself; any other sends the states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detectors.base import EngineProbe
from guard.machine import free_port
from guard.proxy import services
from tests.proxy.conftest import BLOCKED, CLEAN, FLAGGED, POLICY, Proxy, StartProxy
from tests.proxy.engine import FakeEngine, running

OURS = EngineProbe(3, np.ones((1, 1), np.float32), np.zeros(1, np.float32)).name
OTHERS = EngineProbe(3, np.full((1, 1), 2, np.float32), np.zeros(1, np.float32)).name


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "PROBES_EVERY_S", 0.02)


def read(engine: FakeEngine) -> str:
    """What the last request had the engine send."""
    (kind,) = {"hidden", "probes"} & (engine.specs[-1] or {}).keys()
    return kind


async def judged(proxy: Proxy, body: Any = None) -> str:
    return (await proxy.post(body))[1]["x-guard-action"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("logit", "action"), [(CLEAN, "allow"), (FLAGGED, "flag"), (BLOCKED, "block")])
async def test_the_engines_number_is_judged_as_the_state_was(
    start_proxy: StartProxy, logit: float, action: str, streamed: bool
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "words"}], "stream": streamed}
    found = {}
    for probes in ((OURS, OTHERS), None):
        async with running(FakeEngine(logit=logit, probes=probes)) as engine, start_proxy(engine) as proxy:
            assert await judged(proxy, body) == action
            found[read(engine)] = (await proxy.entries(1))[0]["scores"]
            proxy.ledger.unlink()
    assert found["probes"] == found["hidden"]


async def test_an_engine_with_other_weights_sends_states(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(logit=BLOCKED, probes=(OTHERS,))) as engine, start_proxy(engine) as proxy:
        assert await judged(proxy) == "block"
        assert read(engine) == "hidden"


async def test_an_engine_that_is_started_anew_is_asked_for_what_it_has_now(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(probes=())) as engine, start_proxy(engine) as proxy:
        for probes, kind in (((), "hidden"), ((OURS,), "probes"), ((OTHERS,), "hidden"), (None, "hidden")):
            engine.probes = probes
            for _ in range(2000):
                # Between its start and the next look nothing can be read, and on_error flags.
                if await judged(proxy) == "allow" and read(engine) == kind:
                    break
            else:
                pytest.fail(f"{kind} was never read")


async def test_of_several_engines_all_must_have_the_weights(start_proxy: StartProxy) -> None:
    async with (
        running(FakeEngine(probes=(OURS,))) as one,
        running(FakeEngine(probes=())) as two,
        start_proxy(one, upstream=(one.url, two.url)) as proxy,
    ):
        await proxy.post()
        (asked,) = (engine for engine in (one, two) if engine.bodies)
        assert read(asked) == "hidden"
        two.probes = (OURS, OTHERS)
        for _ in range(2000):
            await proxy.post()
            if read(asked) == "probes":
                break
        else:
            pytest.fail("the engines' own arithmetic was never used")


async def test_a_policy_that_is_read_again_goes_on_with_the_engines_weights(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    async with running(FakeEngine(logit=FLAGGED, probes=(OURS,))) as engine, start_proxy(engine) as proxy:
        assert await judged(proxy) == "flag"
        (tmp_path / "policy.yaml").write_text(POLICY.replace("at_least: 0.5", "at_least: 0.4"))
        before = (await proxy.post())[1]["x-guard-policy"]
        for _ in range(2000):
            if (await proxy.post())[1]["x-guard-policy"] != before:
                break
        else:
            pytest.fail("the policy was never read again")
        assert read(engine) == "probes"


async def test_an_engine_that_comes_after_the_guard_is_found(start_proxy: StartProxy) -> None:
    port = free_port()
    engine = FakeEngine(url=f"http://127.0.0.1:{port}", probes=(OURS,))
    async with start_proxy(engine) as proxy:
        assert (await proxy.post())[0] == 502
        async with running(engine, port):
            for _ in range(2000):
                await proxy.post()
                if read(engine) == "probes":
                    break
            else:
                pytest.fail("the engine's own arithmetic was never used")
