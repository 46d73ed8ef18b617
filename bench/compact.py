"""A run in as few characters as it can be read in, a line for each number: a terminal may keep the last page alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from bench import goals
from bench.ratios import (
    Case,
    Load,
    Ratio,
    Rounds,
    first_token_ms,
    loads,
    of_medians,
    paired,
    per_token_ms,
    saturated_tokens_per_s,
)
from bench.variants import SERVED, VARIANTS


def compact(results: Mapping[str, Any]) -> list[str]:
    """What failed comes last, where it is seen."""
    rows = results["rows"]
    lines = [f"{results['card']}; commit {results['commit']}; {results['wall_s']:.0f} s; rounds {results['rounds']}"]
    lines += _engines(results["engines"])
    lines += _cases(per_token_ms(rows, "tpot"), "tpot ms", goals.PER_TOKEN)
    lines += _cases(first_token_ms(rows), "ttft ms", goals.FIRST_TOKEN)
    lines += _cases(saturated_tokens_per_s(rows), "tok/s", {})
    lines += _cases(per_token_ms(rows, "eager"), "tpot ms", {})
    for (model, rate), by_variant in sorted(loads(results["served"]).items()):
        lines += [_served(model, rate, name, by_variant) for name in SERVED if name in by_variant]
    lines += [f"changed {key} {one['changed']}/{one['of']}" for key, one in results["steering_changed"].items()]
    return lines + [f"FAILED {what}: {reason.strip()[-200:]}" for what, reason in results["failures"].items()]


def _engines(engines: Mapping[str, Any]) -> Iterator[str]:
    for key, answer in engines.items():
        worker = answer["worker"]
        memory = [f"{worker[name] / 2**20:.1f}" for name in ("allocated_bytes", "reserved_bytes") if name in worker]
        mode = f"{worker['cudagraph_mode']} async={worker['async_scheduling']} {worker['runner']}"
        yield f"{key:18} start {answer['start_s']:.0f} s, MiB {' / '.join(memory) or 'unknown'}, {mode}"


def _cases(cases: Mapping[Case, Mapping[str, Rounds]], unit: str, goal_of: Mapping[str, float]) -> Iterator[str]:
    for case, by_variant in cases.items():
        where = f"{case.model} {case.requests}x{case.prompt_tokens or 'mixed'}"
        for name in [name for name in VARIANTS if name in by_variant]:
            value = statistics.median(by_variant[name].values())
            ratio = None if name == "vanilla" else paired(by_variant[name], by_variant.get("vanilla", {}))
            goal = goal_of.get(name)
            judged = "" if ratio is None or goal is None else f" {'met' if ratio.middle <= goal else 'MISSED'} {goal}"
            yield f"{where:16} {name:15} {value:9.4g} {unit}{_ratio(ratio)}{judged}"


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f" {ratio.middle:.4f} [{ratio.low:.4f} {ratio.high:.4f}] n={ratio.count}"


def _served(model: str, rate: float, name: str, by_variant: Mapping[str, Load]) -> str:
    load, base = by_variant[name], by_variant.get("vanilla")
    parts = [f"{model} {rate:g}/s {name:15} {load.tokens_per_s:.0f} tok/s, {load.errors} errors"]
    for what, values, others in (
        ("ttft", load.first_token_s, base.first_token_s if base else []),
        ("tpot", load.per_token_s, base.per_token_s if base else []),
    ):
        present = [value for value in values if value is not None]
        middle = f"{statistics.median(present) * 1e3:.4g} ms" if present else "nothing"
        parts.append(f"{what} {middle}{_ratio(None if name == 'vanilla' else of_medians(values, others))}")
    return ", ".join(parts)
