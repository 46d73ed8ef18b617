"""Every variant on one card in one command: engines side by side, asked in turn, so that all share the same minutes.

    python -m bench.aperture --model llama8b --model qwen1p5b        # writes bench/results/DATE-aperture.json
    python -m bench.aperture --model tiny --device cpu --quick       # a rehearsal, minutes on a laptop
    python -m bench.report bench/results/DATE-aperture.json          # docs/benchmarks.md

Owns the command line, the order of the phases and their shares of the time. First all engines of all models start at
once, and the offline phases ask them in turn; then the first model's servers, and the engines that force eager
execution or write files, start beside vLLM's engine, which stays. What does not start is in the file with its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.about import about
from bench.children import ROOT
from bench.offline import batches, offline
from bench.run import Phase, Run, empty_results, say
from bench.served import Servers, commands, served
from bench.shapes import Shape, load_shape
from bench.shares import Shares
from bench.variants import SERVED, VARIANTS, EngineName, taps_of, write_weights

WEIGHTS: dict[Phase, float] = {
    "tpot": 4.0,
    "ttft": 1.5,
    "kernels": 0.3,
    "saturated": 2.5,
    "eager": 1.0,
    "served": 4.5,
}
"""Parts of the time. Each further model gets half as much."""

RESTART_WEIGHT = 1.0
OFFLINE: tuple[Phase, ...] = ("tpot", "ttft", "kernels", "saturated")
BESIDE: tuple[Phase, ...] = ("eager", "served")
OFFLINE_ENGINES: tuple[EngineName, ...] = ("vanilla", "mia", "hotwire")
EAGER_ENGINES: tuple[EngineName, ...] = ("hooks", "extract")

QUICK = {
    "batch": [1, 2],
    "prompt_tokens": 16,
    "output_tokens": 8,
    "long_prompt_tokens": 48,
    "repetitions": 2,
    "saturated_requests": 6,
    "longest_tokens": 12,
    "rate": [4.0],
    "window_s": 1.0,
    "kv_tokens": 8192,
    "small_kv_tokens": 8192,
    "max_num_batched_tokens": 512,
}


def positive(text: str) -> int:
    """Raises ``argparse.ArgumentTypeError``."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    """The same of seconds, or of a rate."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", required=True, help="a shape of bench/shapes, or a folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--phases", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--served-variants", nargs="+", choices=list(SERVED), default=["vanilla", "guarded"])
    parser.add_argument("--limit-s", type=seconds, default=560.0, help="the run is over by then, start-up included")
    parser.add_argument("--start-limit-s", type=seconds, default=240.0, help="for engines to start, each time")
    parser.add_argument("--repetitions", type=positive, default=7, help="rounds of each phase, as many as fit")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--output-tokens", type=positive, default=256)
    parser.add_argument("--long-prompt-tokens", type=positive, default=2048)
    parser.add_argument("--saturated-requests", type=positive, default=256)
    parser.add_argument("--longest-tokens", type=positive, help="cut the lengths of mixed loads, for rehearsals")
    parser.add_argument(
        "--rate", type=seconds, nargs="+", default=[64, 1, 16, 4, 32, 8], help="a second, in this order"
    )
    parser.add_argument("--window-s", type=seconds, default=8.0, help="of arrivals, for each rate and variant")
    parser.add_argument(
        "--kv-tokens", type=positive, default=65536, help="room in the KV caches of vLLM's engine and ours"
    )
    parser.add_argument("--small-kv-tokens", type=positive, default=32768, help="and of the others")
    parser.add_argument("--max-num-batched-tokens", type=positive, default=8192)
    parser.add_argument("--peers", type=Path, default=Path("/tmp/peers"), help="folder with hotwire")  # noqa: S108
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds: a rehearsal, no measurement")
    if "--quick" in (given if given is not None else sys.argv[1:]):
        parser.set_defaults(**QUICK)
    options = parser.parse_args(given)
    for name in options.model:
        try:
            load_shape(name)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--model {name}: {error}")
    return options


def weights(options: argparse.Namespace, shapes: Sequence[Shape]) -> dict[str, float]:
    """Parts of the time by phase, in the order in which they run."""
    ordered: dict[str, float] = {}
    for phases in (OFFLINE[:1], OFFLINE[1:]):
        for i, shape in enumerate(shapes):
            part = 1.0 if i == 0 else 0.5
            ordered |= {f"{phase}/{shape.name}": WEIGHTS[phase] * part for phase in phases if phase in options.phases}
    if later := [phase for phase in BESIDE if phase in options.phases]:
        ordered["restart"] = RESTART_WEIGHT
    return ordered | {f"{phase}/{shapes[0].name}": WEIGHTS[phase] for phase in later}


def beside(run: Run, shape: Shape) -> None:
    """What runs with the first model alone: variants that force eager execution or write files, and the servers."""
    phases = run.options.phases
    with asyncio.Runner() as runner:
        servers = Servers(commands(run, shape) if "served" in phases else {})
        try:
            if "eager" in phases:
                missing = EAGER_ENGINES if (shape.name, "vanilla") in run.children else ("vanilla", *EAGER_ENGINES)
                run.start((shape, name) for name in run.engines(missing))
            runner.run(servers.wait(min(run.options.start_limit_s, run.left_s)))
            run.shares.take("restart")
            for name, reason in servers.failures.items():
                run.fail(f"{shape.name}/server-{name}", reason)
            if "eager" in phases:
                run.phase(
                    shape,
                    "eager",
                    run.options.repetitions,
                    partial(batches, run, shape, "eager", ("vanilla", "eager_hooks", "extract")),
                )
            run.stop(list(run.children))
            if servers.urls:
                served(run, shape, servers, runner)
        finally:
            runner.run(servers.stop())


def main(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns what was written."""
    shapes = [load_shape(name) for name in dict.fromkeys(options.model)]
    now = datetime.now(UTC)
    out: Path = options.out or ROOT / "bench" / "results" / f"{now:%Y-%m-%d}-aperture.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    taps = {shape.name: vars(taps_of(shape)) for shape in shapes}
    with tempfile.TemporaryDirectory(prefix="mia-bench-") as folder:
        run = Run(
            options,
            shapes,
            Shares(weights(options, shapes), time.monotonic() + options.limit_s),
            scratch=Path(folder),
            logs=options.logs or Path(folder) / "logs",
            out=out,
            results=about(vars(options), now) | {"taps": taps} | empty_results(),
            rng=random.Random(options.seed),  # noqa: S311 - an order, no secret
        )
        for shape in shapes:
            write_weights(shape, run.scratch / shape.name / "mia")
        try:
            if set(OFFLINE) & set(options.phases):
                run.start((shape, name) for shape in shapes for name in run.engines(OFFLINE_ENGINES))
                offline(run, [name for name, one in VARIANTS.items() if one.engine in OFFLINE_ENGINES])
                run.stop([key for key in run.children if key != (shapes[0].name, "vanilla")])
            if set(BESIDE) & set(options.phases):
                beside(run, shapes[0])
        finally:
            run.stop(list(run.children))
            run.save()
    say(f"written to {out}")
    return run.results


if __name__ == "__main__":
    chosen = arguments()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench.aperture: there is no GPU here that torch can use; --device cpu rehearses without one")
    try:
        main(chosen)
    except OSError as error:
        sys.exit(f"bench.aperture: {error}")
