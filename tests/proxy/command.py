"""``guard proxy`` in a process of its own, in front of a stand-in engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from guard.machine import free_port
from tests.processes import started_by
from tests.proxy.conftest import POLICY, write_probe
from tests.proxy.engine import FakeEngine

START_LIMIT_S = 60


@dataclass
class Running:
    """A proxy process. ``url`` without path. ``said``: up to its being ready."""

    url: str
    process: asyncio.subprocess.Process
    ledger: Path
    said: str

    async def ask(
        self, method: str, path: str, *, url: str = "", tls: ssl.SSLContext | None = None, **request: Any
    ) -> tuple[int, dict[str, Any]]:
        connector = aiohttp.TCPConnector(ssl=tls) if tls is not None else None
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(method, (url or self.url) + path, **request) as answer,
        ):
            return answer.status, json.loads(await answer.read())

    def outcomes(self) -> list[str]:
        return [json.loads(line)["outcome"] for line in self.ledger.read_text().splitlines()]


def spawned(proxy: Running) -> list[psutil.Process]:
    """Its workers."""
    return started_by(proxy.process.pid, "spawn_main")


@contextlib.asynccontextmanager
async def guard_proxy(
    folder: Path, engine: FakeEngine, *options: str, scheme: str = "http", **variables: str
) -> AsyncIterator[Running]:
    """Started with a file of settings that names the engine, and these options and variables."""
    if not (folder / "model_configs").exists():
        write_probe(folder / "model_configs" / "probe")
    (folder / "policy.yaml").write_text(POLICY)
    port = free_port()
    settings = {
        "upstream": engine.url,
        "policy": str(folder / "policy.yaml"),
        "config_key": "tiny",
        "model_configs": str(folder / "model_configs"),
        "ledger": str(folder / "ledger.jsonl"),
        "port": 1,
    }
    (folder / "guard.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "guard", "proxy", "--config", str(folder / "guard.yaml"), "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command,
        *options,
        env={**os.environ, "NO_COLOR": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(START_LIMIT_S):
            assert process.stdout is not None
            said = b""
            while b"ready: " not in said:
                line = await process.stdout.readline()
                assert line, f"it ended: {said.decode()}"
                said += line
        yield Running(f"{scheme}://127.0.0.1:{port}", process, folder / "ledger.jsonl", said.decode())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
