"""From raw rows to the numbers of the report: times of a token, and ratios to vLLM with their spread.

A ratio is taken within one round, where both were measured seconds apart, and then the median over the rounds; its
spread is the smallest and the largest. For served loads, of which there are few rounds and many requests, a ratio is
of two medians over the same requests, and its spread the middle 95 % of what resampling the requests gives.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
Rounds = dict[int, float]
"""One value a repetition."""

RESAMPLES = 1000


@dataclass(frozen=True)
class Case:
    """What was measured, but for the variant. ``prompt_tokens``: of each request; None for mixed lengths."""

    model: str
    phase: str
    requests: int
    prompt_tokens: int | None


@dataclass(frozen=True)
class Ratio:
    """``count``: rounds or requests that it is made of."""

    middle: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Load:
    """One served variant at one rate, over all rounds. Lists by request, None where nothing came; seconds. ``lags``:
    see ``bench.courier``."""

    first_token_s: list[float | None]
    per_token_s: list[float | None]
    readout_s: list[float | None]
    tokens_per_s: float
    errors: int
    lags: dict[str, float] = field(default_factory=dict)


def per_token_ms(rows: Iterable[Row], phase: str) -> dict[Case, dict[str, Rounds]]:
    """Milliseconds per output token, by case and variant: the long run minus the short one, over the tokens between.

    A round whose long run was the shorter one is noise, not a time; the ratio's count of rounds shows that it is gone.
    """
    runs: dict[tuple[Case, str, int], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["phase"] == phase:
            tokens = row["output_tokens"] / row["requests"]
            runs[_case(row), row["variant"], row["repetition"]].append((tokens, row["seconds"]))
    found: dict[Case, dict[str, Rounds]] = defaultdict(lambda: defaultdict(dict))
    for (case, variant, repetition), pair in runs.items():
        if len(pair) != 2:  # an engine died between the two
            continue
        (short, short_s), (long, long_s) = sorted(pair)
        if long_s > short_s:
            found[case][variant][repetition] = (long_s - short_s) / (long - short) * 1e3
    return found


def first_token_ms(rows: Iterable[Row]) -> dict[Case, dict[str, Rounds]]:
    """Milliseconds of runs of one token, by case and variant."""
    found: dict[Case, dict[str, Rounds]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["phase"] == "ttft":
            found[_case(row)][row["variant"]][row["repetition"]] = row["seconds"] * 1e3
    return found


def saturated_tokens_per_s(rows: Iterable[Row]) -> dict[Case, dict[str, Rounds]]:
    """Output tokens a second of all requests together, by case and variant."""
    found: dict[Case, dict[str, Rounds]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["phase"] == "saturated":
            case = Case(row["model"], row["phase"], row["requests"], None)
            found[case][row["variant"]][row["repetition"]] = row["output_tokens"] / row["seconds"]
    return found


def _case(row: Row) -> Case:
    return Case(row["model"], row["phase"], row["requests"], row["prompt_tokens"] // row["requests"])


def paired(values: Rounds, base: Rounds) -> Ratio | None:
    """Median over the rounds that both have, smallest and largest; None when there are none."""
    ratios = [values[repetition] / base[repetition] for repetition in sorted(values.keys() & base.keys())]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios)) if ratios else None


def loads(served: Iterable[Row]) -> dict[tuple[str, float], dict[str, Load]]:
    """Served variants by model and rate. Requests of all rounds follow each other, alike for every variant."""
    windows: dict[tuple[str, float], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(served, key=lambda row: row["repetition"]):
        windows[row["model"], row["rate_per_s"]][row["variant"]].append(row)
    return {key: {variant: _load(rows) for variant, rows in by_variant.items()} for key, by_variant in windows.items()}


def _load(rows: Sequence[Row]) -> Load:
    first, per_token, readout = [], [], []
    tokens, busy_s = 0, 0.0
    errors = 0
    lags: dict[str, float] = defaultdict(float)
    for row in rows:
        window = row["answers"]
        for bound, value in row.get("lags", {}).items():
            lags[bound] += value
        sent, ends = window["sent_s"], window["last_token_s"]
        for i, tokens_asked in enumerate(window["output_tokens"]):
            failed = bool(window["error"][i]) or ends[i] is None
            errors += failed
            first.append(None if failed else window["first_token_s"][i])
            readout.append(None if failed else window["readout_s"][i])
            apart = None if failed or tokens_asked < 2 else (ends[i] - window["first_token_s"][i]) / (tokens_asked - 1)
            per_token.append(apart)
            tokens += 0 if failed else tokens_asked
        busy_s += max((s + e for s, e in zip(sent, ends, strict=True) if e is not None), default=0.0)
    return Load(first, per_token, readout, tokens / busy_s if busy_s else 0.0, errors, dict(lags))


def of_medians(values: Sequence[float | None], base: Sequence[float | None], seed: int = 0) -> Ratio | None:
    """Ratio of the medians over requests that both answered, with the middle 95 % of its bootstrap."""
    pairs = [(v, b) for v, b in zip(values, base, strict=False) if v is not None and b is not None]
    if not pairs:
        return None
    rng = random.Random(seed)  # noqa: S311 - resampling, no secret
    resampled = sorted(_median_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = resampled[int(RESAMPLES * 0.025)], resampled[int(RESAMPLES * 0.975) - 1]
    return Ratio(_median_ratio(pairs), low, high, len(pairs))


def _median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(v for v, _ in pairs) / statistics.median(b for _, b in pairs)


def quantiles(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Median and 99th percentile of those that are there; None when there are fewer than two."""
    present = [value for value in values if value is not None]
    if len(present) < 2:
        return None
    cuts = statistics.quantiles(present, n=100, method="inclusive")
    return cuts[49], cuts[98]
