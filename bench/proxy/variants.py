"""Who is asked: the stub engine itself, our proxy before it, and LiteLLM's proxy with one guardrail before it.

Owns starting and ending these processes, each on its processor, and reading what they have used.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.children import ROOT

START_LIMIT_S = 240.0
PROXY_CPU, OTHER_CPU = "0", "1"
"""Processors: the proxy under test has one of its own, stub engine and client share another."""

LITELLM_KEY = "sk-bench-0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Used:
    """Of a process and what it started, since it began, in seconds: ``cpu_s``, and ``waited_s`` in which it could have
    run and other programs had the processor."""

    cpu_s: float
    waited_s: float
    rss_bytes: int


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    key: str
    process: subprocess.Popen[bytes]

    def used(self) -> Used:
        cpu_ns = waited_ns = rss = 0
        root = psutil.Process(self.process.pid)
        for one in (root, *root.children(recursive=True)):
            rss += one.memory_info().rss
            for task in Path(f"/proc/{one.pid}/task").iterdir():
                try:
                    cpu, waited, _ = (task / "schedstat").read_text().split()
                except OSError:  # the thread has ended
                    continue
                cpu_ns, waited_ns = cpu_ns + int(cpu), waited_ns + int(waited)
        return Used(cpu_ns / 1e9, waited_ns / 1e9, rss)


def pinned(cpu: str, command: list[str]) -> list[str]:
    """The command, to run on one processor. Raises ``FileNotFoundError`` without util-linux."""
    taskset = shutil.which("taskset")
    if taskset is None:
        raise FileNotFoundError("taskset, of util-linux, is needed")
    return [taskset, "-c", cpu, *command]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def started(name: str, command: list[str], port: int, key: str, cpu: str, folder: Path) -> Iterator[Server]:
    """The server, ready; ended at the block's end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    log_file = folder / f"{name}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            pinned(cpu, command),
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
            cwd=folder,
        )
    try:
        _wait(process, port, log_file)
        yield Server(name, port, key, process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"did not start; the end of {log_file}:\n{log_file.read_text(errors='replace')[-2000:]}")


@contextmanager
def stub(folder: Path, tokens_per_s: float, taps: str) -> Iterator[Server]:
    """``taps``: in JSON, what it says that it has; a guard has an engine multiply that has a detector's probes."""
    port = free_port()
    command = [sys.executable, "-m", "bench.proxy.stub_engine", str(port), "--tokens-per-s", str(tokens_per_s)]
    command += ["--taps", taps]
    with started("direct", command, port, "none", OTHER_CPU, folder) as server:
        yield server


@contextmanager
def guard(folder: Path, engine: Server, policy: Path) -> Iterator[Server]:
    """Our proxy, with an API key and with the policy's detectors, whose readouts the stub sends."""
    port, keys = free_port(), folder / "keys.yaml"
    make = [sys.executable, "-m", "guard", "keys", "create", "--file", str(keys), "--name", "bench"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    key = subprocess.run(make, capture_output=True, text=True, check=True, env=environment).stdout.strip()
    command = [sys.executable, "-m", "guard", "proxy", "--upstream", f"http://127.0.0.1:{engine.port}"]
    command += ["--port", str(port), "--policy", str(policy), "--keys", str(keys)]
    command += ["--ledger", str(folder / "ledger.jsonl")]
    with started("guard", command, port, key, PROXY_CPU, folder) as server:
        yield server


@contextmanager
def litellm(folder: Path, engine: Server, executable: Path) -> Iterator[Server]:
    """LiteLLM's proxy with a key, no database, one worker, and one guardrail that looks for a pattern."""
    port = free_port()
    shutil.copy(ROOT / "bench" / "proxy" / "litellm_words.py", folder)
    base = f"http://127.0.0.1:{engine.port}/v1"
    (folder / "config.yaml").write_text(f"""\
model_list:
  - model_name: stub
    litellm_params: {{model: hosted_vllm/stub, api_base: "{base}", api_key: none}}
guardrails:
  - guardrail_name: words
    litellm_params: {{guardrail: litellm_words.Words, mode: pre_call, default_on: true}}
general_settings: {{master_key: {LITELLM_KEY}}}
litellm_settings: {{telemetry: false}}
""")
    command = [str(executable), "--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    with started("litellm", [*command, "--num_workers", "1"], port, LITELLM_KEY, PROXY_CPU, folder) as server:
        yield server
