"""The phases without a server: what is asked of the engines, and in which order.

One round of a phase asks every variant, in random order, before the next batch size: what is compared lies seconds
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench.run import WARM_UP, Phase, Run, say
from bench.shapes import Shape
from bench.variants import VARIANTS
from bench.workload import lengths

TTFT_VARIANTS = ("vanilla", "idle", "hidden", "attention", "all")
TTFT_LARGEST_BATCH = 8
TTFT_ROUNDS = 4
"""First tokens are quick: so many times as many rounds as of the others."""

SATURATED_VARIANTS = ("vanilla", "idle", "hidden", "attention", "steered", "all")
WARM_UP_TOKENS = 8
PROFILED_TOKENS = 16
CHECKED_TOKENS = 4


def batches(run: Run, shape: Shape, phase: Phase, variants: Sequence[str], repetition: int) -> None:
    """Every batch size, and at each every variant: a run of one token and a long one, for the time of one token."""
    tokens = WARM_UP_TOKENS if repetition == WARM_UP else run.options.output_tokens
    for batch in run.options.batch:
        for variant in run.present(shape, variants):
            for outputs in (1, 1 + tokens):
                prompts = [run.options.prompt_tokens] * batch
                run.measure(shape, phase, variant, repetition, prompts, [outputs] * batch)


def first_tokens(run: Run, shape: Shape, repetition: int) -> None:
    """Runs of one token, for the time to the first."""
    for batch in [batch for batch in run.options.batch if batch <= TTFT_LARGEST_BATCH]:
        for tokens in (run.options.prompt_tokens, run.options.long_prompt_tokens):
            for variant in run.present(shape, TTFT_VARIANTS):
                run.measure(shape, "ttft", variant, repetition, [tokens] * batch, [1] * batch)


def kernels(run: Run, shape: Shape, variants: Sequence[str], repetition: int) -> None:
    """What runs on the device in a run of one token and in a longer one, so that the steps between can be told: of one
    request, since the prompts of several fall into steps as they happen to arrive."""
    for variant in run.present(shape, variants):
        for outputs in (1, 1 + PROFILED_TOKENS):
            run.profile(shape, variant, repetition, [run.options.prompt_tokens], [outputs])


def saturate(run: Run, shape: Shape, repetition: int) -> None:
    """Many requests of mixed lengths at once."""
    prompts, outputs = lengths(run.options.saturated_requests, repetition + 2, run.options.longest_tokens)
    if repetition == WARM_UP:
        outputs = [min(WARM_UP_TOKENS, output) for output in outputs]
    for variant in run.present(shape, SATURATED_VARIANTS):
        run.measure(shape, "saturated", variant, repetition, prompts, outputs)


def check_steering(run: Run, shape: Shape) -> None:
    """Steered answers must differ from those of the same engine unasked, or the variant would measure nothing."""
    unasked = {VARIANTS[name].engine: name for name in ("idle", "hotwire_idle")}
    batch = max(run.options.batch)
    lengths = {"prompt_tokens": [run.options.prompt_tokens] * batch, "output_tokens": [CHECKED_TOKENS] * batch}
    for variant in run.present(shape, [name for name, one in VARIANTS.items() if one.steers]):
        other = unasked[VARIANTS[variant].engine]
        if (answer := run.ask(shape, variant, "changed", unasked=other, seed=0, **lengths)) is not None:
            run.results["steering_changed"][f"{shape.name}/{variant}"] = answer
            say(f"{shape.name}/{variant}: {answer['changed']} of {answer['of']} answers changed")
            if answer["changed"] == 0:
                run.fail(f"{shape.name}/{variant}", "steering changed no answer: its times are not those of steering")


def offline(run: Run, variants: Sequence[str]) -> None:
    """All of them, for every model: first what matters most."""
    phases, repetitions = run.options.phases, run.options.repetitions
    for shape in run.shapes:
        check_steering(run, shape)
    for shape in run.shapes:
        if "tpot" in phases:
            run.phase(shape, "tpot", repetitions, partial(batches, run, shape, "tpot", variants))
    for shape in run.shapes:
        if "ttft" in phases:
            run.phase(shape, "ttft", repetitions * TTFT_ROUNDS, partial(first_tokens, run, shape))
        if "kernels" in phases:
            run.phase(shape, "kernels", 1, partial(kernels, run, shape, variants))
        if "saturated" in phases:
            run.phase(shape, "saturated", repetitions, partial(saturate, run, shape))
