"""A detector of another distribution that holds Python's lock for ever, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import psutil
import pytest

from detectors import isolated
from detectors.base import Score
from detectors.isolated import IsolatedText
from detectors.registry import build_detector
from guard.policy import PolicyError, bind, build_detectors
from guard.policy.loading import load_policy
from tests.processes import started_by
from tests.proxy.conftest import BODY, StartProxy, eventually
from tests.proxy.engine import FakeEngine, running

MODULE = """\
import os, re, time
from detectors.base import Score

class Stuck:
    kind, thresholds, isolated = "stuck", {"half": 0.5}, True

    def __init__(self, path):
        self.path = path

    def score_text(self, text):
        print("to standard output", flush=True)
        if "hang" in text:
            re.match(r"(a+)+$", "a" * 64 + "b")
        if "raise" in text:
            raise KeyError(text)
        if "leave" in text:
            os._exit(3)
        at = text.find("secret")
        spans = ((at, at + 6),) if at >= 0 else ()
        return Score("scored", float(at >= 0), spans=spans, details=(("pid", os.getpid()),))

class Reading(Stuck):
    kind, score_text = "reading", None

    def plan(self):
        raise NotImplementedError

    def score(self, readouts):
        raise NotImplementedError
"""
POLICY = """\
version: 1
name: test
prompt_timeout_s: {limit}
detectors: {{text: {{kind: stuck}}}}
rules: [{{name: leak, when: {{detector: text, at_least: 0.5}}, action: block, on_error: flag}}]
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed as other distributions are, for this process and those that it starts."""
    site = tmp_path / "site"
    (site / "stuck-1.dist-info").mkdir(parents=True)
    (site / "stuck-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1\n")
    points = "[mia_guard.detectors]\nstuck = stuck_plugin:Stuck\nreading = stuck_plugin:Reading\n"
    (site / "stuck-1.dist-info" / "entry_points.txt").write_text(points)
    (site / "stuck_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))


def saying(text: str) -> dict[str, object]:
    return {**BODY, "messages": [{"role": "user", "content": text}]}


def readers() -> list[psutil.Process]:
    return started_by(None, "detectors.isolated_worker", recursive=True)


async def test_a_text_that_never_ends_stops_nobody_else_and_the_next_is_read_again(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, POLICY.format(limit=20)) as proxy:
        assert (await proxy.post(saying("a secret")))[0] == 400
        (first,) = readers()
    await eventually(lambda: not readers())
    async with running(FakeEngine()) as engine, start_proxy(engine, POLICY.format(limit=1.5)) as proxy:
        while (await proxy.post(saying("a secret")))[0] != 400:
            await asyncio.sleep(0.1)
        (second,) = readers()
        assert second.pid != first.pid
        hung, waited = asyncio.create_task(proxy.post(saying("please hang"))), 0.0
        await asyncio.sleep(0.2)
        while not hung.done():
            began_s = time.perf_counter()
            assert (await proxy.get("/livez"))[0] == 200
            waited = max(waited, time.perf_counter() - began_s)
            await asyncio.sleep(0.02)
        status, headers, _ = await hung
        assert (status, headers["x-guard-action"]) == (200, "flag")
        assert waited < 1
        while (await proxy.post(saying("a secret")))[0] != 400:
            await asyncio.sleep(0.1)
        (third,) = readers()
        assert third.pid != second.pid
        entries = [json.loads(line) for line in proxy.ledger.read_text().splitlines()]
        assert "not read in time" in str([entry["detectors"] for entry in entries])
    await eventually(lambda: not readers())


async def test_a_policy_that_changes_has_a_process_before_a_text_comes_and_the_old_one_ends(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "RETIRED_S", 0.3)
    async with running(FakeEngine()) as engine, start_proxy(engine, POLICY.format(limit=20)) as proxy:
        assert (await proxy.post(saying("a secret")))[0] == 400
        (first,) = readers()
        proxy.ledger.with_name("policy.yaml").write_text(POLICY.format(limit=19))
        await eventually(lambda: [one.pid for one in readers() if one.pid != first.pid] != [])
        assert (await proxy.post(saying("a secret")))[0] == 400
        await eventually(lambda: first.pid not in {one.pid for one in readers()})


def test_what_it_says_crosses_whole_and_what_it_raises_or_its_end_is_no_score(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    detector = IsolatedText(build_detector("stuck", path), path)  # type: ignore[arg-type]
    assert (detector.kind, detector.thresholds, readers()) == ("stuck", {"half": 0.5}, [])
    score = detector.score_text("half a character \ud800 and a secret")
    (reader,) = readers()
    assert score == Score("scored", 1.0, spans=((25, 31),), details=(("pid", reader.pid),))
    assert detector.score_text("x" * 5_000_000).value == 0.0
    assert detector.score_text("raise") == Score("unavailable", reason="the detector failed (KeyError)")
    assert detector.score_text("leave").reason == "the detector failed (its process ended)"
    again = detector.score_text("a secret")
    assert (again.value, again.details == score.details) == (1.0, False)
    del detector
    assert readers() == []


def test_only_detectors_of_text_can_be_isolated(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(POLICY.format(limit=1).replace("kind: stuck", "kind: reading"))
    with pytest.raises(PolicyError, match=r"p.yaml:4: detectors.text.kind: reading is isolated, which only"):
        build_detectors(load_policy(tmp_path / "p.yaml"), "tiny", tmp_path)
    (tmp_path / "p.yaml").write_text(POLICY.format(limit=1))
    loaded = load_policy(tmp_path / "p.yaml")
    assert bind(loaded, build_detectors(loaded, "tiny", tmp_path)).measurements["text"].reads_text
    assert readers() == []


def test_one_that_does_not_load_is_not_started_for_every_text(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    detector = IsolatedText(build_detector("stuck", path), path)  # type: ignore[arg-type]
    (tmp_path / "site" / "stuck_plugin.py").write_text("raise SystemExit")
    assert detector.score_text("a").status == "unavailable"
    began_s = time.perf_counter()
    assert all(detector.score_text("a").reason.endswith("(its process does not start)") for _ in range(50))
    assert time.perf_counter() - began_s < 1
