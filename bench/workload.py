"""What is asked of an engine, drawn once from fixed seeds: lengths like those of chats, and arrivals.

Lengths are lognormal, cut at both ends: prompts with a median of 100 tokens and sigma 1.2, answers with 140 and 0.9,
which gives means of about 190 and 180. That is the size of ShareGPT's conversations, whose texts are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE = 100.0, 1.2, (8, 1024)
ANSWER_MEDIAN, ANSWER_SIGMA, ANSWER_RANGE = 140.0, 0.9, (8, 512)


@dataclass(frozen=True)
class Arrival:
    """One request. ``at_s``: seconds after the start of its window."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def lengths(count: int, seed: int, longest: int | None = None) -> tuple[list[int], list[int]]:
    """Prompt and answer lengths in tokens of ``count`` requests, none above ``longest``."""
    rng = np.random.default_rng(seed)
    prompts = rng.lognormal(np.log(PROMPT_MEDIAN), PROMPT_SIGMA, count)
    answers = rng.lognormal(np.log(ANSWER_MEDIAN), ANSWER_SIGMA, count)
    return _cut(prompts, PROMPT_RANGE, longest), _cut(answers, ANSWER_RANGE, longest)


def poisson(rate_per_s: float, window_s: float, seed: int, longest: int | None = None) -> list[Arrival]:
    """Arrivals of a Poisson process with ``rate_per_s`` within ``window_s``; at least one."""
    rng = np.random.default_rng([seed, 1])
    gaps = rng.exponential(1 / rate_per_s, int(rate_per_s * window_s * 3) + 20)
    times = np.cumsum(gaps)
    times = times[: max(1, int(np.searchsorted(times, window_s)))]
    prompts, answers = lengths(len(times), seed, longest)
    return [Arrival(float(at), p, a) for at, p, a in zip(times, prompts, answers, strict=True)]


def _cut(values: np.ndarray, limits: tuple[int, int], longest: int | None) -> list[int]:
    low, high = limits
    return [int(value) for value in np.clip(values, low, min(high, longest or high))]
