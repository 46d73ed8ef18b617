"""Servers under a Poisson load: vLLM's own and the one that the guard starts, asked in turn.

Owns their start, their end, and the client's process. Ours is started by the command that ``guard serve`` uses; vLLM's
by the same one without what is ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from bench import courier
from bench.children import ROOT
from bench.engine_child import UNLIKELY_IDS
from bench.run import WARM_UP, Run
from bench.shapes import Shape
from bench.variants import ENVIRONMENT, SERVED, EngineName, taps_of
from bench.workload import Arrival, poisson
from guard.engine_process import LOOPBACK, EngineCommand, EngineError, EngineProcess, engine_command
from guard.models import ResolvedModel

Device = Literal["cuda", "cpu"]
SERVER_NAMES: tuple[EngineName, ...] = ("vanilla", "mia")
CLIENT_LIMIT_S = 200.0
WARM_UP_WINDOW_S = 1.0
DRAIN_S = 5.0
"""The longest answers need about this long after the last arrival."""
OURS = ("--additional-config", "--middleware")
"""Options of the guard's command, each with a value, that vLLM's own server does not get."""


class LoadError(RuntimeError):
    """The client did not come to its end."""


def with_tokenizer(shape: Shape, folder: Path) -> Path:
    """The model's folder with a tokenizer that knows a word for each id, so that servers have text to stream."""
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shape.folder / "config.json", folder)
    words = {f"w{i}": i for i in range(shape.vocabulary)}
    Tokenizer(models.WordLevel(words, unk_token=f"w{UNLIKELY_IDS}")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def server_command(
    name: EngineName, shape: Shape, folder: Path, weights: Path, log_file: Path, *, device: Device, kv_tokens: int
) -> EngineCommand:
    """One server's command. ``folder``: the model with a tokenizer."""
    extra = ["--load-format", "dummy", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.1"]
    extra += ["--kv-cache-memory-bytes", str(kv_tokens * shape.kv_bytes_per_token)]
    ours = engine_command(
        ResolvedModel(str(folder), shape.name, shape.name),
        taps_of(shape).engine_config(weights),
        port=free_port(),
        log_file=log_file,
        compiled=device == "cuda",
        extra_arguments=tuple(extra),
    )
    if name == "mia":
        return replace(ours, environment={**ENVIRONMENT, **ours.environment})
    keep = list(ours.arguments)
    for option in OURS:
        at = keep.index(option)
        del keep[at : at + 2]
    if device == "cuda":
        # What our adapter may need at start is not vLLM's default.
        keep = [argument for argument in keep if argument != "--no-async-scheduling"]
    environment = {key: value for key, value in ours.environment.items() if key != "VLLM_USE_V2_MODEL_RUNNER"}
    return replace(ours, arguments=tuple(keep), environment={**ENVIRONMENT, **environment, "VLLM_PLUGINS": "none"})


class Servers:
    """Server processes by name. They start when this is made, all at once, and end with ``stop``."""

    def __init__(self, commands: Mapping[EngineName, EngineCommand]) -> None:
        self.failures: dict[EngineName, str] = {}
        self.urls: dict[EngineName, str] = {}
        self._processes = {name: EngineProcess(command) for name, command in commands.items()}

    async def wait(self, limit_s: float) -> None:
        """Until each answers or has failed; ``urls`` are those that answer."""

        async def one(name: EngineName, process: EngineProcess) -> None:
            try:
                await process.wait_healthy(limit_s)
            except EngineError as error:
                self.failures[name] = str(error)
            else:
                self.urls[name] = process.command.url

        await asyncio.gather(*(one(name, process) for name, process in self._processes.items()))

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes.values()))


async def window(url: str, shape: Shape, variant: str, arrivals: Sequence[Arrival], seed: int) -> list[dict[str, Any]]:
    """One variant under one load, asked by a client of its own. Raises ``LoadError`` when the client fails."""
    plan = {
        "url": url,
        "shape": str(shape.folder),
        "variant": variant,
        "arrivals": [asdict(arrival) for arrival in arrivals],
        "seed": seed,
    }
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.load_client"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        output, _ = await asyncio.wait_for(client.communicate(json.dumps(plan).encode()), CLIENT_LIMIT_S)
    except TimeoutError:
        client.kill()
        raise LoadError(f"the load of {len(arrivals)} requests did not end within {CLIENT_LIMIT_S:.0f} s") from None
    if client.returncode != 0:
        raise LoadError(f"the client ended with {client.returncode}")
    return [json.loads(line) for line in output.decode().splitlines()]


async def one_rate(run: Run, shape: Shape, servers: Servers, rate_per_s: float, repetition: int) -> None:
    """Every variant once at one rate, in random order, all with the same arrivals and lengths."""
    options = run.options
    window_s = WARM_UP_WINDOW_S if repetition == WARM_UP else options.window_s
    seed = int(rate_per_s * 1000) + repetition + 1
    arrivals = poisson(rate_per_s, window_s, seed, options.longest_tokens)
    order = [name for name in options.served_variants if SERVED[name].engine in servers.urls]
    run.rng.shuffle(order)
    for name in order:
        # Ours is asked by several variants: its prefix cache must not know a prompt from another one's window.
        prompts_seed = seed * len(SERVED) + list(SERVED).index(name)
        url = servers.urls[SERVED[name].engine]
        before = await courier.counts(url)
        answers = await window(url, shape, name, arrivals, prompts_seed)
        lags = courier.between(before, await courier.counts(url))
        if repetition != WARM_UP:
            row = {"model": shape.name, "variant": name, "rate_per_s": rate_per_s, "repetition": repetition}
            run.results["served"].append({**row, "answers": columns(answers), "lags": lags})


def served(run: Run, shape: Shape, servers: Servers, runner: asyncio.Runner) -> None:
    """All rates, as often as there is time. A client that fails ends the phase."""
    options = run.options

    def round_of(repetition: int) -> None:
        for rate_per_s in [max(options.rate)] if repetition == WARM_UP else options.rate:
            if run.left_s < len(options.served_variants) * (options.window_s + DRAIN_S):
                return run.fail(f"{shape.name}/served at {rate_per_s:g}/s, round {repetition}", "no time was left")
            runner.run(one_rate(run, shape, servers, rate_per_s, repetition))

    try:
        run.phase(shape, "served", run.options.repetitions, round_of)
    except LoadError as error:
        run.fail(f"{shape.name}/served", error)


def commands(run: Run, shape: Shape) -> dict[EngineName, EngineCommand]:
    """Of the servers that the wanted variants ask."""
    scratch = run.scratch / shape.name
    folder = with_tokenizer(shape, scratch / "served" / shape.name)
    wanted = {SERVED[name].engine for name in run.options.served_variants}
    return {
        name: server_command(
            name,
            shape,
            folder,
            scratch / "mia",
            run.logs / f"{shape.name}-server-{name}.log",
            device=run.options.device,
            kv_tokens=run.options.kv_tokens,
        )
        for name in SERVER_NAMES
        if name in wanted
    }


def columns(answers: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Answers as one list for each of their fields: a third of the bytes. Times to the microsecond."""
    fields = list(answers[0]) if answers else []
    return {
        field: [round(value, 6) if isinstance(value := answer[field], float) else value for answer in answers]
        for field in fields
    }
