"""The console of a proxy with several worker processes: one list, whoever answered, and what becomes of it when one of
them stops or dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from guard.machine import free_port
from guard.proxy.keys import NewKey, create_key
from tests.proxy.command import START_LIMIT_S, Running, guard_proxy, spawned
from tests.proxy.conftest import BODY, POLICY
from tests.proxy.engine import FakeEngine, running

POLICIES = {"policies": ["test"], "model": "tiny", "prompt": "a run of the playground", "max_tokens": 8}


@dataclass
class Workers:
    """``first`` has the console."""

    proxy: Running
    first: psutil.Process
    second: psutil.Process
    admin_url: str
    admin_key: str
    client_key: str

    async def console(self, path: str, method: str = "GET", json: Any = None) -> tuple[int, Any]:
        url, headers = f"{self.admin_url}/console/api", {"authorization": f"Bearer {self.admin_key}"}
        return await self.proxy.ask(method, path, url=url, headers=headers, json=json)

    async def chat(self) -> str:
        """The id of a request, on a connection of its own."""
        url, headers = f"{self.proxy.url}/v1/chat/completions", {"authorization": f"Bearer {self.client_key}"}
        async with aiohttp.ClientSession() as session, session.post(url, json=BODY, headers=headers) as answer:
            assert answer.status == 200
            return answer.headers["x-guard-request-id"]

    async def chat_with(self, worker: psutil.Process) -> str:
        """The same, answered by this worker: the other takes nothing meanwhile."""
        other = self.second if worker == self.first else self.first
        other.suspend()
        try:
            id_ = await self.chat()
        finally:
            other.resume()
        async with asyncio.timeout(10):  # it ends after its answer
            while id_ not in await self.ids():
                await asyncio.sleep(0.02)
        return id_

    async def listed(self, after: str = "", wait_s: float = 0) -> dict[str, Any]:
        status, told = await self.console(f"/requests?after={after}&wait_s={wait_s}")
        assert status == 200
        return dict(told)

    async def back(self) -> None:
        """Until a worker that has died is back."""
        async with asyncio.timeout(START_LIMIT_S):
            assert self.proxy.process.stdout is not None
            while b"is back" not in await self.proxy.process.stdout.readline():
                pass

    def other_than(self, worker: psutil.Process) -> psutil.Process:
        (other,) = [one for one in spawned(self.proxy) if one != worker]
        return other

    async def ids(self) -> list[str]:
        return [one["request_id"] for one in (await self.listed())["requests"]]


@asynccontextmanager
async def workers(folder: Path, policy: str = POLICY) -> AsyncIterator[Workers]:
    keys, admin_port = folder / "keys.yaml", free_port()
    admin, client = create_key(keys, NewKey(admin=True))[0], create_key(keys, NewKey())[0]
    (folder / "live.yaml").write_text(policy)
    options = ("--workers", "2", "--keys", str(keys), "--admin-port", str(admin_port))
    # A short name: that of a socket may have a hundred characters.
    variables = {"TMPDIR": "/tmp"}  # noqa: S108
    async with (
        running(FakeEngine()) as engine,
        guard_proxy(folder, engine, *options, "--policy", str(folder / "live.yaml"), **variables) as proxy,
    ):
        first, second = sorted(spawned(proxy), key=lambda one: not _listens(one, admin_port))
        yield Workers(proxy, first, second, f"http://127.0.0.1:{admin_port}", admin, client)


def _listens(process: psutil.Process, port: int) -> bool:
    return any(one.laddr.port == port and one.status == "LISTEN" for one in process.net_connections())


async def test_requests_of_all_workers_are_listed_in_order_opened_and_counted(tmp_path: Path) -> None:
    async with workers(tmp_path, POLICY + "capture: {prompt: true, answer: true}\n") as running:
        asked = [await running.chat_with(one) for one in (running.second, running.first, running.second)]
        told = await running.listed()
        assert [one["request_id"] for one in told["requests"]] == asked
        assert told["missing"] == []
        # Who waits hears of the other worker's as soon as it has ended.
        waiting = asyncio.create_task(running.listed(told["cursor"], 20))
        await asyncio.sleep(0.3)
        asked.append(await running.chat_with(running.second))
        async with asyncio.timeout(5):
            assert [one["request_id"] for one in (await waiting)["requests"]] == asked[3:]

        status, played = await running.console("/playground", "POST", POLICIES)
        assert status == 200
        asked.append(played["runs"][0]["request"]["entry"]["request_id"])
        assert await running.ids() == asked
        for id_ in asked:
            _, page = await running.console(f"/requests/{id_}")
            assert page["entry"]["request_id"] == id_
            assert page["content"]["answer"] == "The answer is 42."
            status, seen = await running.console(f"/requests/{id_}/inspection", "POST", {})
            assert status == 200
            assert "".join(seen["tokens"]).endswith("The answer is 42.")
        assert (await running.console("/calibration"))[1]["recent"]["probe"]["requests"] == len(asked)
        assert (await running.console(f"/requests/{'0' * 32}"))[0] == 404

        # More than one answer has: each once, whichever worker has how many.
        asked += await asyncio.gather(*(running.chat() for _ in range(300)))
        seen_ids: list[str] = []
        cursor, more, answers = "", True, 0
        while more:
            told = await running.listed(cursor)
            seen_ids += [one["request_id"] for one in told["requests"]]
            cursor, more, answers = told["cursor"], told["more"], answers + 1
        assert answers == 2
        assert seen_ids[:5] == asked[:5]
        assert sorted(seen_ids) == sorted(asked)


async def test_a_worker_that_stops_or_dies_is_named_and_costs_its_own_requests_alone(tmp_path: Path) -> None:
    async with workers(tmp_path) as running:
        mine, its = [await running.chat_with(one) for one in (running.first, running.second)]
        before = await running.listed()
        running.second.suspend()
        try:
            async with asyncio.timeout(10):
                told, later, (status, _), (gone, body) = await asyncio.gather(
                    running.listed(),
                    running.listed(before["cursor"]),
                    running.console(f"/requests/{mine}"),
                    running.console(f"/requests/{its}"),
                )
            assert ([one["request_id"] for one in told["requests"]], told["missing"]) == ([mine], [1])
            assert (status, gone) == (200, 404)
            assert "worker 1" in body["error"]["message"]
        finally:
            running.second.resume()
        # Whoever reads on misses nothing of what it has when it answers again, and is told nothing twice.
        more = await running.chat_with(running.second)
        async with asyncio.timeout(10):
            while (told := await running.listed(later["cursor"]))["missing"]:
                await asyncio.sleep(0.1)
        assert [one["request_id"] for one in told["requests"]] == [more]

        waiting = asyncio.create_task(running.listed(told["cursor"], 20))
        await asyncio.sleep(0.3)
        running.second.kill()
        async with asyncio.timeout(5):
            assert (await waiting)["missing"] == [1]
        await running.back()
        assert await running.ids() == [mine]
        running.second = running.other_than(running.first)
        new = await running.chat_with(running.second)
        told = await running.listed(told["cursor"])
        assert ([one["request_id"] for one in told["requests"]], told["missing"]) == ([new], [])
        assert await running.ids() == [mine, new]

        # The one that has the console: what others have outlives it.
        running.first.kill()
        await running.back()
        running.first = running.other_than(running.second)
        assert await running.ids() == [new]
        assert (await running.console(f"/requests/{new}"))[0] == 200


async def test_the_sockets_between_workers_are_for_their_user_alone_and_read_nothing_but_questions(
    tmp_path: Path,
) -> None:
    async with workers(tmp_path) as running:
        folder = Path(running.second.environ()["PROMETHEUS_MULTIPROC_DIR"])
        (socket,) = sockets_of_one_user(folder)
        for sent in (b"\x80\x04\x95 no JSON\n", b"[]\n", b'{"what": "everything"}\n', b'{"path": "/etc"}\n', b""):
            reader, writer = await asyncio.open_unix_connection(socket)
            writer.write(sent)
            writer.write_eof()
            assert b"entry" not in await reader.read()
            writer.close()
        id_ = await running.chat_with(running.second)
        assert await running.ids() == [id_]


def sockets_of_one_user(folder: Path) -> list[Path]:
    """None where others can get to them."""
    return [one for one in folder.iterdir() if one.is_socket()] if folder.stat().st_mode & 0o077 == 0 else []
