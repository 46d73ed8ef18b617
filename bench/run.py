"""One run: the engines that live, what they were asked, and the file that grows with it.

Owns starting, asking and losing engines. What is asked in which order is ``bench.offline`` and ``bench.served``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from bench.children import Child, ChildError
from bench.shapes import Shape
from bench.shares import Shares
from bench.variants import ON_CPU, VARIANTS, EngineName, engine_start

Phase = Literal["tpot", "ttft", "kernels", "saturated", "eager", "served"]

WARM_UP = -1
"""The repetition that is not recorded."""

RUN_LIMIT_S = 120.0
PATIENCE_S = 15.0
"""A run that began before the deadline may last so long."""


def empty_results() -> dict[str, Any]:
    """The parts of a run's file that fill while it runs."""
    return {
        "engines": {},
        "wall_s": 0.0,
        "steering_changed": {},
        "rounds": {},
        "rows": [],
        "kernels": [],
        "served": [],
        "failures": {},
    }


@dataclass
class Run:
    """``children``: engines that live, by model and name. ``results``: what ``save`` writes to ``out``."""

    options: argparse.Namespace
    shapes: list[Shape]
    shares: Shares
    scratch: Path
    logs: Path
    out: Path
    results: dict[str, Any]
    rng: random.Random
    children: dict[tuple[str, EngineName], Child] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.shares.deadline_s - time.monotonic()

    def save(self) -> None:
        self.results["wall_s"] = round(self.options.limit_s - self.left_s, 1)
        unfinished = self.out.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.results) + "\n")
        unfinished.replace(self.out)

    def fail(self, what: str, error: object) -> None:
        """Note why something is missing from the results."""
        self.results["failures"][what] = str(error)
        say(f"FAILED {what}: {str(error).strip()[-600:]}")

    def engines(self, among: Iterable[EngineName]) -> list[EngineName]:
        """Those that the wanted variants ask and this device has."""
        wanted = {VARIANTS[name].engine for name in self.options.variants}
        here = ON_CPU if self.options.device == "cpu" else among
        return [name for name in among if name in wanted and name in here]

    def start(self, wanted: Iterable[tuple[Shape, EngineName]]) -> None:
        """Start engines, all at once. One that fails is noted, and the run goes on without it."""
        starting = {(shape.name, name): self._launch(shape, name) for shape, name in wanted}
        deadline_s = time.monotonic() + min(self.options.start_limit_s, self.left_s)
        for (model, name), child in starting.items():
            try:
                answer = child.hear(deadline_s - time.monotonic())
            except ChildError as error:
                self.fail(f"{model}/{name}", error)
                child.close()
            else:
                self.children[model, name] = child
                self.results["engines"][f"{model}/{name}"] = answer
                say(f"{model}/{name} started in {answer['start_s']:.0f} s: {answer['worker']}")

    def _launch(self, shape: Shape, name: EngineName) -> Child:
        scratch = self.scratch / shape.name
        options = self.options
        how = engine_start(
            name,
            shape,
            device=options.device,
            kv_tokens=options.kv_tokens if name in ("vanilla", "mia") else options.small_kv_tokens,
            max_num_batched_tokens=options.max_num_batched_tokens,
            scratch=scratch,
            peers=options.peers,
        )
        child = Child(how.environment, self.logs / f"{shape.name}-{name}.log")
        child.tell("start", engine=name, shape=str(shape.folder), vllm_args=how.vllm_args, scratch=str(scratch))
        return child

    def stop(self, keys: Iterable[tuple[str, EngineName]]) -> None:
        """End engines, all at once, and wait until they have given their memory back."""
        closing = [self.children.pop(key) for key in keys if key in self.children]
        for child in closing:
            child.finish()
        for child in closing:
            child.close()

    def present(self, shape: Shape, names: Iterable[str]) -> list[str]:
        """Wanted variants among ``names`` whose engine lives, in random order."""
        wanted = [name for name in names if name in self.options.variants]
        found = [name for name in wanted if (shape.name, VARIANTS[name].engine) in self.children]
        self.rng.shuffle(found)
        return found

    def ask(self, shape: Shape, variant: str, command: str, **fields: Any) -> dict[str, Any] | None:
        """One command to a variant's engine; None when it fails, and then its engine is out of the run."""
        key = (shape.name, VARIANTS[variant].engine)
        try:
            limit_s = max(PATIENCE_S, min(RUN_LIMIT_S, self.left_s))
            return self.children[key].ask(command, limit_s, variant=variant, **fields)
        except ChildError as error:
            self.fail(f"{shape.name}/{variant}", error)
            self.stop([key])
            return None

    def measure(
        self, shape: Shape, phase: Phase, variant: str, repetition: int, prompts: list[int], outputs: list[int]
    ) -> None:
        """One run of one variant, lengths in tokens; a row of the results unless it is a warm-up."""
        if (shape.name, VARIANTS[variant].engine) not in self.children:
            return
        lengths = {"prompt_tokens": prompts, "output_tokens": outputs}
        answer = self.ask(shape, variant, "run", **lengths, seed=_seed(repetition, outputs))
        if answer is not None and repetition != WARM_UP:
            row = {"model": shape.name, "phase": phase, "variant": variant, "repetition": repetition}
            row |= {"requests": len(prompts), "prompt_tokens": sum(prompts), "output_tokens": sum(outputs)}
            self.results["rows"].append({**row, **answer})

    def profile(self, shape: Shape, variant: str, repetition: int, prompts: list[int], outputs: list[int]) -> None:
        """What ran on the device in one run of one variant, unless it is a warm-up."""
        if (shape.name, VARIANTS[variant].engine) not in self.children:
            return
        lengths = {"prompt_tokens": prompts, "output_tokens": outputs}
        answer = self.ask(shape, variant, "profile", **lengths, seed=_seed(repetition, outputs))
        if answer is not None and repetition != WARM_UP:
            row = {"model": shape.name, "variant": variant, "requests": len(prompts), "output_tokens": outputs[0]}
            self.results["kernels"].append({**row, **answer})

    def phase(self, shape: Shape, phase: Phase, times: int, round_of: Callable[[int], None]) -> None:
        """A warm-up round, which is thrown away, then as many as ``times`` that the phase's time has room for."""
        key = f"{phase}/{shape.name}"

        def saved_round(repetition: int) -> None:
            round_of(repetition)
            self.save()

        if self.left_s > 0:
            round_of(WARM_UP)
        self.results["rounds"][key] = self.shares.repeat(key, times, saved_round)
        say(f"{key}: {self.results['rounds'][key]} rounds, {self.left_s:.0f} s left")


def _seed(repetition: int, outputs: list[int]) -> int:
    """All variants of a round get the same prompts, and no engine's variant gets them again in the next."""
    return (repetition + 2) * 1009 + sum(outputs)


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)
