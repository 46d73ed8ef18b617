"""What a proxy costs under load: the stub engine itself, ours, and LiteLLM's, asked in turn in one run.

    python -m bench.proxy.load --litellm /path/to/litellm     # bench/results/DATE-proxy-load.json
    python -m bench.proxy.load --soak-s 600 --cases ''        # 1,000 streams at once for ten minutes, and memory
    python -m bench.proxy.report bench/results/FILE.json ...  # the tables of docs/benchmarks.md

``--litellm`` is a command of an environment of its own. A round asks every variant in random order, a case at a time.
The engine has the policy's probes, as guard serve starts it; with --states it has none, and hidden states leave it.
The proxy under test has a processor for itself, the stub engine and the client share another; where other programs use
these processors too, what the proxy waited for them is measured and said.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.about import commit
from bench.children import ROOT
from bench.proxy.load_client import Plan
from bench.proxy.variants import OTHER_CPU, PROXY_CPU, Server, Used, guard, litellm, pinned, stub
from guard.models import DEFAULT_MODEL
from guard.serve import engine_config_of

PACKAGES = ("mia-guard", "aiohttp", "uvicorn", "uvloop", "httptools", "starlette", "pydantic", "numpy")
POLICY = ROOT / "policies" / "default.yaml"
SAMPLE_EVERY_S = 5.0


@dataclass(frozen=True)
class Case:
    """``think_s``: mean pause of each client between two requests; 0: each asks again at once."""

    name: str
    clients: int
    streamed: bool
    tokens: int
    think_s: float = 0.0


CASES = (
    Case("whole", 64, False, 64),
    Case("streamed", 64, True, 64),
    Case("steady-whole", 64, False, 64, 0.25),
    Case("steady-streamed", 64, True, 64, 0.25),
    Case("paced-whole", 64, False, 64, 1.0),
    Case("paced-streamed", 64, True, 64, 1.0),
    Case("alone-whole", 1, False, 64, 0.02),
    Case("alone-streamed", 1, True, 64, 0.02),
)
SOAK = Case("soak", 1000, True, 200)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--litellm", type=Path, help="LiteLLM's command; without it only ours is measured")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one case of one variant in one round")
    parser.add_argument("--tokens-per-s", type=float, default=20_000, help="of the stub engine, all streams together")
    parser.add_argument("--states", action="store_true", help="the engine has no probes, so hidden states leave it")
    parser.add_argument("--soak-s", type=float, default=0.0, help="how long 1,000 streams are kept up; 0: not")
    parser.add_argument("--soak-tokens-per-s", type=float, default=5_000, help="of the stub engine meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def ask(server: Server, case: Case, seconds: float, warm_s: float = 1.0) -> dict[str, Any]:
    """One case of one variant: what the client saw, and what the server used for it."""
    plan = Plan(server.port, server.key, case.clients, case.streamed, case.tokens, seconds, warm_s, case.think_s)
    before = server.used()
    started_s = time.perf_counter()
    # A file, since what the client says at its end is more than a pipe holds.
    with tempfile.TemporaryFile("w+") as said:
        subprocess.run(
            pinned(OTHER_CPU, [sys.executable, "-m", "bench.proxy.load_client"]),
            input=json.dumps(asdict(plan)),
            stdout=said,
            text=True,
            check=True,
            cwd=ROOT,
        )
        said.seek(0)
        observed: dict[str, Any] = json.load(said)
    return summary(observed, before, server.used(), time.perf_counter() - started_s)


def summary(observed: dict[str, Any], before: Used, after: Used, wall_s: float) -> dict[str, Any]:
    """Quantiles in milliseconds, and what one request took of the server. CPU is counted from the client's start to its
    end, so it is divided by all answers, those of the warming up too; so is the rate, which a slow proxy's last answers
    count in."""
    first, total = observed["first_s"], observed["total_s"]
    answers = max(1, observed["answers"])
    return {
        "counted": len(total),
        "wrong": observed["wrong"],
        "errors": observed["errors"],
        "most_open": observed["most_open"],
        "requests_per_s": observed["answers"] / observed["seconds"],
        "first_ms": quantiles(first),
        "total_ms": quantiles(total),
        "cpu_ms_per_request": (after.cpu_s - before.cpu_s) / answers * 1e3,
        "waited_ms_per_request": (after.waited_s - before.waited_s) / answers * 1e3,
        "busy": (after.cpu_s - before.cpu_s) / wall_s,
        "client_busy": observed["cpu_s"] / wall_s,
        "rss_mib": after.rss_bytes / 2**20,
        "load_average": os.getloadavg()[0],
    }


def quantiles(values_s: list[float]) -> dict[str, float] | None:
    if len(values_s) < 2:
        return None
    cuts = statistics.quantiles([value * 1e3 for value in values_s], n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


def rounds(options: argparse.Namespace, servers: list[Server]) -> list[dict[str, Any]]:
    rng = random.Random(options.seed)  # noqa: S311 - an order, no secret
    wanted = [case for case in CASES if case.name in options.cases.split(",")]
    rows = []
    for number in range(options.rounds):
        for case in wanted:
            for server in rng.sample(servers, len(servers)):
                row = {"round": number, "case": case.name, "variant": server.name, **ask(server, case, options.seconds)}
                rows.append(row)
                print(f"{number} {case.name:15} {server.name:8} {row['requests_per_s']:9.1f}/s  ", end="")
                print(f"cpu {row['cpu_ms_per_request']:.3f} ms  waited {row['waited_ms_per_request']:.3f} ms  ", end="")
                print(f"first {row['first_ms']}  total {row['total_ms']}  wrong {row['wrong']}", flush=True)
    return rows


def soak(options: argparse.Namespace, server: Server) -> dict[str, Any]:
    """1,000 clients with a stream each, all the time, and the proxy's memory every few seconds."""
    plan = Plan(server.port, server.key, SOAK.clients, True, SOAK.tokens, options.soak_s, 20.0)
    before = server.used()
    # A file, since what the client says at its end is more than a pipe holds.
    with tempfile.TemporaryFile("w+") as said:
        client = subprocess.Popen(
            pinned(OTHER_CPU, [sys.executable, "-m", "bench.proxy.load_client"]),
            stdin=subprocess.PIPE,
            stdout=said,
            text=True,
            cwd=ROOT,
        )
        assert client.stdin is not None
        client.stdin.write(json.dumps(asdict(plan)))
        client.stdin.close()
        started_s = time.perf_counter()
        samples = []
        while client.poll() is None:
            samples.append({"at_s": time.perf_counter() - started_s, "rss_mib": server.used().rss_bytes / 2**20})
            time.sleep(SAMPLE_EVERY_S)
        said.seek(0)
        observed: dict[str, Any] = json.load(said)
    wall_s = time.perf_counter() - started_s
    return {**summary(observed, before, server.used(), wall_s), "seconds": options.soak_s, "memory": samples}


def taps(folder: Path, states: bool) -> str:
    """In JSON those that ``guard serve`` starts an engine with for the policy; with ``states`` without its probes."""
    mia = json.loads(engine_config_of(DEFAULT_MODEL, POLICY, folder / "probes"))["mia"]
    return json.dumps({name: value for name, value in mia.items() if not (states and name == "probes")})


def about(options: argparse.Namespace) -> dict[str, Any]:
    processor = next(
        (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "command": ["python", "-m", "bench.proxy.load", *sys.argv[1:]],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": f"{processor}, {os.cpu_count()} of them; proxy on {PROXY_CPU}, engine and client on {OTHER_CPU}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            **({"litellm": litellm_version(options.litellm)} if options.litellm else {}),
        },
        "options": {key: str(value) for key, value in vars(options).items()},
        "load_average": os.getloadavg(),
    }


def litellm_version(executable: Path) -> str:
    python = executable.resolve().parent / "python"
    command = [str(python), "-c", "from importlib.metadata import version; print(version('litellm'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    options = arguments()
    result = about(options)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.cases:
            engine = stack.enter_context(stub(folder, options.tokens_per_s, taps(folder, options.states)))
            servers = [engine, stack.enter_context(guard(folder, engine, POLICY))]
            if options.litellm:
                servers.append(stack.enter_context(litellm(folder, engine, options.litellm)))
            result["rows"] = rounds(options, servers)
        if options.soak_s:
            apart = folder / "soak"
            apart.mkdir()
            slow = stack.enter_context(stub(apart, options.soak_tokens_per_s, taps(apart, options.states)))
            result["soak"] = soak(options, stack.enter_context(guard(apart, slow, POLICY)))
    kind = "proxy-load" if options.cases else "proxy-soak"
    out = options.out or ROOT / "bench" / "results" / f"{datetime.now(UTC):%Y-%m-%d}-{kind}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
