"""A flood of requests that are refused at the door pushes out nothing that is kept of others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from guard.proxy import refusals
from guard.proxy.keys import Limits, NewKey, create_key
from guard.proxy.refusals import MOST_A_WINDOW
from guard.telemetry.ledger_reader import entries
from guard.telemetry.ledger_stats import one_line, stats
from tests.proxy.conftest import BODY, StartProxy
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_tracing import Collector, collecting

CHAT, MODELS = "/v1/chat/completions", "/v1/models"


async def flood(url: str, path: str, count: int, headers: dict[str, str] | None = None) -> set[int]:
    """The statuses that came."""
    statuses = set()
    async with aiohttp.ClientSession() as session:
        for _ in range(count):
            async with session.post(url + path, json=BODY, headers=headers) as answer:
                statuses.add(answer.status)
    return statuses


def entries_of(ledger: Path) -> list[dict[str, Any]]:
    return [entry for entry in entries(ledger) if entry is not None]


async def test_a_flood_without_a_key_costs_no_entry_of_others_and_every_refusal_is_counted(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    key, _ = create_key(file, NewKey())
    many = 3 * MOST_A_WINDOW
    # Files of some entries, of which one is kept: as many entries as there were requests would take the first away.
    settings = {"keys": file, "ledger_max_bytes": 1 << 16, "ledger_keep_files": 1}
    async with collecting(Collector()) as collector, running(FakeEngine()) as engine:
        async with start_proxy(engine, otlp_endpoint=collector.url, **settings) as proxy:
            assert (await proxy.post(headers={"authorization": f"Bearer {key}"}))[0] == 200
            assert await flood(proxy.url, CHAT, many) == {401}
            assert await flood(proxy.url, MODELS, 7, {"authorization": "Bearer mg_guessed"}) == {401}
            page = (await proxy.get("/metrics"))[2].decode()
        found = entries_of(proxy.ledger)
        told = collector.raw
    judged, *refused = found
    assert judged["outcome"] == "completed"
    assert {entry["error_code"] for entry in refused} == {"invalid_api_key"}
    together = {entry["route"]: entry["count"] for entry in refused[MOST_A_WINDOW:]}
    assert together == {CHAT: many - MOST_A_WINDOW, MODELS: 7}
    assert stats(found).counts["outcome"] == {"completed": 1, "refused": many + 7}
    assert f"({many - MOST_A_WINDOW} requests like it)" in one_line(refused[MOST_A_WINDOW])
    families = {one.name: one for one in text_string_to_metric_families(page)}
    ended = [one for one in families["guard_requests"].samples if one.labels.get("outcome") == "refused"]
    assert sum(one.value for one in ended if one.name == "guard_requests_total") == many + 7
    # Of a name each: those without a model are called after their route.
    assert sum(raw.count(b"POST /v1/chat/completions") for raw in told) == MOST_A_WINDOW


async def test_a_key_over_its_limit_cannot_flood_the_ledger_either_and_is_named(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    busy, made = create_key(file, NewKey(limits=Limits(requests_per_s=0.001)))
    quiet, _ = create_key(file, NewKey())
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        await flood(proxy.url, CHAT, 2 * MOST_A_WINDOW, {"authorization": f"Bearer {busy}"})
        assert (await proxy.post(headers={"authorization": f"Bearer {quiet}"}))[0] == 200
    refused = [entry for entry in entries_of(proxy.ledger) if entry["outcome"] == "refused"]
    assert {entry["key"] for entry in refused} == {made.id}
    assert len(refused) == MOST_A_WINDOW + 1
    assert sum(entry["count"] for entry in refused) == 2 * MOST_A_WINDOW - 1


async def test_what_was_counted_is_written_while_the_proxy_runs_and_single_entries_begin_anew(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "WINDOW_S", 0.5)
    file = tmp_path / "keys.yaml"
    create_key(file, NewKey())
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        async with asyncio.timeout(30):
            counts = [1]
            while max(counts, default=1) == 1:
                await flood(proxy.url, CHAT, MOST_A_WINDOW)
                counts = [one["count"] for one in entries_of(proxy.ledger)]
            while counts[-1] > 1:
                await flood(proxy.url, CHAT, 1)
                counts = [one["count"] for one in entries_of(proxy.ledger)]
