"""A Prometheus of our own, Debian's ``prometheus``: it scrapes a pair every second under the rules that ship.

Owns its process, its configuration, and how a panel's query becomes one of Prometheus'. For pictures and for tests.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from guard.data import data_folder
from guard.machine import free_port

PROGRAM = "prometheus"
SCRAPE_S = 1
RATE_INTERVAL = "15s"
START_LIMIT_S = 30.0

Series = dict[str, Any]
"""``metric``: labels; ``value`` or ``values``: pairs of a time in seconds and a number as text."""


def installed() -> bool:
    return shutil.which(PROGRAM) is not None


class QueryError(RuntimeError):
    """What Prometheus says of a query that it cannot answer."""


@contextmanager
def prometheus(folder: Path, proxy_url: str, engine_url: str) -> Iterator[str]:
    """Its URL, until the block is left. ``folder``: an empty one, for its data."""
    targets = {"guard": proxy_url, "vllm": engine_url}
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://")]}]}
        for job, url in targets.items()
    ]
    every = f"{SCRAPE_S}s"
    config = {"global": {"scrape_interval": every, "evaluation_interval": every}, "rule_files": ["rules.yml"]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({**config, "scrape_configs": jobs}))
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": [group | {"interval": every} for group in groups()]}))
    port = free_port()
    command = [PROGRAM, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(START_LIMIT_S)


def groups() -> list[dict[str, Any]]:
    """Of the rules that ship."""
    file = data_folder("dashboards") / "prometheus" / "rules.yml"
    found: list[dict[str, Any]] = yaml.safe_load(file.read_text())["groups"]
    return found


def filled_in(expr: str, variables: Mapping[str, str]) -> str:
    """A panel's query with Grafana's variables replaced. variables: their values, as regular expressions."""
    for name, value in {"__rate_interval": RATE_INTERVAL, **variables}.items():
        expr = expr.replace(f"${name}", value)
    return expr


class Prometheus:
    """Its API. Raises ``QueryError``."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def query(self, expr: str) -> list[Series]:
        """What it is now."""
        data = await self._get("query", {"query": expr})
        found: list[Series] = data["result"] if data["resultType"] == "vector" else []
        return found

    async def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[Series]:
        data = await self._get("query_range", {"query": expr, "start": start_s, "end": end_s, "step": step_s})
        found: list[Series] = data["result"]
        return found

    async def rules(self) -> list[dict[str, Any]]:
        data = await self._get("rules", {})
        return [rule for group in data["groups"] for rule in group["rules"]]

    async def _get(self, what: str, parameters: Mapping[str, str | float]) -> Any:
        deadline_s = time.monotonic() + START_LIMIT_S
        while True:
            try:
                async with self._session.get(f"{self._url}/api/v1/{what}", params=dict(parameters)) as answer:
                    if answer.status != 503:
                        body = await answer.json()
                        break
            except aiohttp.ClientConnectorError:
                if time.monotonic() > deadline_s:
                    raise
        if body["status"] != "success":
            raise QueryError(f"{parameters}: {body['error']}")
        return body["data"]
