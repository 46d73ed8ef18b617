"""``guard proxy --workers``: several processes that act as one."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections import Counter
from pathlib import Path

import aiohttp
import psutil
import pytest
from typer.testing import CliRunner

from guard.cli import app
from guard.machine import free_port
from guard.owned_folder import METRICS, owned_folder
from guard.proxy.keys import Limits, NewKey, create_key
from guard.telemetry.ledger_check import check
from tests.processes import runs
from tests.proxy.command import START_LIMIT_S, guard_proxy, spawned
from tests.proxy.conftest import BODY, POLICY
from tests.proxy.engine import FakeEngine, running


async def test_several_workers_are_one_proxy(tmp_path: Path) -> None:
    """Each answers; all have the same policies; their counts are one, and so is their ledger's chain; one that dies
    comes back; all end together."""
    keys = tmp_path / "keys.yaml"
    admin = create_key(keys, NewKey(admin=True))[0]
    client = {"authorization": f"Bearer {create_key(keys, NewKey())[0]}"}
    admin_port = free_port()
    options = ("--workers", "2", "--keys", str(keys), "--admin-port", str(admin_port))
    engine = FakeEngine(word_delay_s=0.05)
    async with running(engine), guard_proxy(tmp_path, engine, *options) as proxy:
        workers = spawned(proxy)
        assert len(workers) == 2

        async def ask() -> None:
            assert (await proxy.ask("POST", "/v1/chat/completions", json=BODY, headers=client))[0] == 200

        def connections() -> list[int]:
            port = int(proxy.url.rpartition(":")[2])
            return [
                sum(c.laddr.port == port and c.status == "ESTABLISHED" for c in w.net_connections()) for w in workers
            ]

        most = [0, 0]
        for _ in range(20):
            asking = [asyncio.create_task(ask()) for _ in range(20)]
            while not all(one.done() for one in asking):
                most = [max(pair) for pair in zip(most, connections(), strict=True)]
                await asyncio.sleep(0.02)
            await asyncio.gather(*asking)
            if all(most):
                break
        assert all(most), most

        async with aiohttp.ClientSession() as session:
            url, headers = f"http://127.0.0.1:{admin_port}/admin/v1/policies", {"authorization": f"Bearer {admin}"}
            async with session.get(url, headers=headers) as answer:
                before = (await answer.json())["version"]
        (tmp_path / "policy.yaml").write_text(POLICY.replace("name: test", "name: other"))
        seen: Counter[str] = Counter()
        async with asyncio.timeout(20):
            while seen["other"] < 20:
                _, ready = await proxy.ask("GET", "/readyz")
                name = ready["policy"].partition("@")[0]
                seen = seen + Counter([name]) if name == "other" else Counter()
        assert ready["policies_version"] != before[:12]

        counted = Path(workers[0].environ()["PROMETHEUS_MULTIPROC_DIR"])
        assert str(workers[0].pid) in counting_in(counted)
        workers[0].kill()
        async with asyncio.timeout(START_LIMIT_S):
            assert proxy.process.stdout is not None
            while b"is back" not in await proxy.process.stdout.readline():
                pass
        assert str(workers[0].pid) not in counting_in(counted)
        assert "ended" in counting_in(counted)
        await ask()
        before_last, last = len(engine.bodies), asyncio.create_task(ask())
        while len(engine.bodies) == before_last:
            await asyncio.sleep(0.01)
        proxy.process.send_signal(signal.SIGTERM)
        await last
        assert await asyncio.wait_for(proxy.process.wait(), 20) == 0
        assert set(proxy.outcomes()) == {"completed"}
        checked = check(proxy.ledger)
        assert (checked.problems, checked.entries) == ([], len(proxy.outcomes()))
        assert not any(runs(one) for one in workers)


def counting_in(folder: Path) -> set[str]:
    """Processes that have files there."""
    return {file.stem.rpartition("_")[2] for file in folder.glob("*.db")}


async def test_workers_end_when_the_process_that_started_them_is_killed_and_their_folder_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    strange, elsewhere = tmp_path / "guard-metrics-strange", tmp_path / "elsewhere"
    for folder in (strange, elsewhere):
        folder.mkdir()
        (folder / "kept").touch()
    (elsewhere / "owner.lock").touch()
    (tmp_path / "guard-metrics-link").symlink_to(elsewhere)
    strangers = folders(tmp_path)
    variables = {"TMPDIR": str(tmp_path)}
    async with (
        running(FakeEngine()) as engine,
        guard_proxy(tmp_path, engine, "--workers", "2", **variables) as proxy,
    ):
        workers = psutil.Process(proxy.process.pid).children()
        (its,) = folders(tmp_path) - strangers
        with owned_folder(METRICS) as mine:
            # The next start, while the one before it runs.
            assert folders(tmp_path) - strangers == {its, Path(mine).name}
            with owned_folder(METRICS):
                assert Path(mine).name in folders(tmp_path)
            assert list((tmp_path / its).glob("*.db"))
        assert folders(tmp_path) - strangers == {its}
        proxy.process.kill()
        await proxy.process.wait()
        async with asyncio.timeout(20):
            while any(runs(one) for one in workers):
                await asyncio.sleep(0.05)
        assert folders(tmp_path) - strangers == {its}, "nobody was left to remove it"
        with owned_folder(METRICS) as mine:
            assert folders(tmp_path) - strangers == {Path(mine).name}
    assert folders(tmp_path) == strangers
    assert (elsewhere / "kept").exists()


def folders(temporary: Path) -> set[str]:
    return {one.name for one in temporary.glob("guard-metrics-*")}


def test_limits_of_keys_need_redis_when_several_processes_count_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    create_key(keys, NewKey(limits=Limits(concurrent=1)))
    command = ["proxy", "--keys", str(keys), "--workers", "2", "--port", str(free_port())]
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, "--ledger", str(tmp_path / "ledger")])
    assert ended.exit_code == 1
    assert "has limits, which several worker processes count only through Redis" in ended.output
