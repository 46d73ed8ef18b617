"""Writes ``docs/benchmarks.md`` and its plot from the results of one run or several.

    python -m bench.report bench/results/FILE.json [MORE.json ...]
    python -m bench.report --compact FILE.json      # prints a line for each number, and writes nothing

Owns the part of the page between its two markers. No figure there is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import courier, goals
from bench.children import ROOT
from bench.compact import compact
from bench.device_time import beside, steps
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
    quantiles,
    saturated_tokens_per_s,
)
from bench.variants import SERVED, VARIANTS

BEGIN, END = "<!-- bench.report begins -->", "<!-- bench.report ends -->"
PAGE = ROOT / "docs" / "benchmarks.md"
PLOT = ROOT / "docs" / "benchmarks.svg"
BASE = "vanilla"

Goal = Callable[[float, float | None], str]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Nothing where there are no rows: a head alone says only that something was not measured."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return []
    return ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |", *lines, ""]


def spread(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.middle:.4f} ({ratio.low:.4f} to {ratio.high:.4f}; {ratio.count})"


def rounds_table(
    cases: Mapping[Case, Mapping[str, Rounds]], unit: str, goal_of: Mapping[str, float], verdict: Goal
) -> list[str]:
    """One row for each variant of each case, vLLM's first."""
    rows = []
    for case, by_variant in sorted(cases.items(), key=lambda item: (item[0].requests, item[0].prompt_tokens or 0)):
        base = by_variant.get(BASE, {})
        for name in [name for name in VARIANTS if name in by_variant]:
            ratio = None if name == BASE else paired(by_variant[name], base)
            rows.append(
                (
                    str(case.requests),
                    "mixed" if case.prompt_tokens is None else str(case.prompt_tokens),
                    VARIANTS[name].title,
                    f"{statistics.median(by_variant[name].values()):.5g}",
                    spread(ratio),
                    "" if ratio is None else verdict(ratio.middle, goal_of.get(name)),
                )
            )
    return table(("requests", "prompt tokens", "variant", unit, "ratio (least to most; rounds)", "goal"), rows)


def by_model(cases: Mapping[Case, Any]) -> dict[str, dict[Case, Any]]:
    models: dict[str, dict[Case, Any]] = {}
    for case, values in cases.items():
        models.setdefault(case.model, {})[case] = values
    return models


def offline_sections(results: Mapping[str, Any]) -> list[str]:
    rows = results["rows"]
    everywhere = {name: goals.SATURATED for name in VARIANTS if name != BASE}
    parts: tuple[tuple[str, Mapping[Case, Any], str, Mapping[str, float], Goal], ...] = (
        ("time per output token", per_token_ms(rows, "tpot"), "ms", goals.PER_TOKEN, goals.at_most),
        ("time to the first token", first_token_ms(rows), "ms", goals.FIRST_TOKEN, goals.at_most),
        ("saturated throughput", saturated_tokens_per_s(rows), "tokens/s", everywhere, goals.at_least),
        ("time per output token beside what needs no graphs", per_token_ms(rows, "eager"), "ms", {}, goals.at_most),
    )
    lines = []
    for title, cases, unit, goal_of, verdict in parts:
        for model, of_model in by_model(cases).items():
            lines += [f"### {model}: {title}", "", *rounds_table(of_model, unit, goal_of, verdict)]
    return lines


SHOWN_KERNELS = 6
"""Of those that a variant has more of than vLLM, or less."""

SHOWN_CHARACTERS = 60


def device_sections(results: Mapping[str, Any]) -> list[str]:
    """Nothing for runs without profiles; the first ones knew none."""
    found = steps(results.get("kernels", ()))
    lines = []
    for model in dict.fromkeys(one.model for one in found):
        of_model = [one for one in found if one.model == model]
        base = next((one for one in of_model if one.variant == BASE), None)
        rows = []
        for one in sorted(of_model, key=lambda one: list(VARIANTS).index(one.variant)):
            more = [] if base is None or one.variant == BASE else beside(one, base)[:SHOWN_KERNELS]
            told = ", ".join(f"`{name[:SHOWN_CHARACTERS]}` {by.us:+.1f} ({by.runs:+.3g})" for name, by in more)
            runs, us = one.whole
            rows.append((VARIANTS[one.variant].title, f"{runs:.1f}", f"{us:.1f}", told))
        head = ("variant", "kernels", "us on the device", "what differs most from vLLM: us (kernels)")
        lines += [f"### {model}: on the device, one step that decodes one request", "", *table(head, rows)]
    return lines


def served_sections(results: Mapping[str, Any]) -> list[str]:
    lines = []
    found = loads(results["served"])
    for model in dict.fromkeys(model for model, _ in found):
        at_rates = {rate: found[model, rate] for rate in sorted(rate for name, rate in found if name == model)}
        rows = [
            served_row(rate, name, by_variant)
            for rate, by_variant in at_rates.items()
            for name in SERVED
            if name in by_variant
        ]
        head = ["requests/s", "variant", "first token p50 / p99 ms", "ratio of p50 (95 %; requests)"]
        head += ["per token p50 / p99 ms", "ratio of p50 (95 %; requests)", "tokens/s (ratio)", "errors"]
        lines += [f"### {model}: served", "", *table(head, rows), *readout_table(model, at_rates)]
    return lines


def served_row(rate: float, name: str, by_variant: Mapping[str, Load]) -> tuple[str, ...]:
    load, base = by_variant[name], by_variant.get(BASE)
    compared = base if name != BASE else None
    return (
        f"{rate:g}",
        SERVED[name].title,
        in_ms(load.first_token_s),
        spread(of_medians(load.first_token_s, compared.first_token_s)) if compared else "",
        in_ms(load.per_token_s),
        spread(of_medians(load.per_token_s, compared.per_token_s)) if compared else "",
        f"{load.tokens_per_s:.5g}" + (f" ({load.tokens_per_s / compared.tokens_per_s:.4f})" if compared else ""),
        str(load.errors),
    )


def in_ms(values: Iterable[float | None]) -> str:
    cuts = quantiles(values)
    return "" if cuts is None else f"{cuts[0] * 1e3:.4g} / {cuts[1] * 1e3:.4g}"


def readout_table(model: str, at_rates: Mapping[float, Mapping[str, Load]]) -> list[str]:
    """When readouts of the prompt reach the client: before the first token of the same answer, and how much later than
    vLLM's first token for the same request, which bounds what follows the end of prefill from above."""
    rows = []
    for rate, by_variant in at_rates.items():
        base = by_variant.get(BASE)
        for name, load in by_variant.items():
            pairs = [(r, f) for r, f in zip(load.readout_s, load.first_token_s, strict=True) if r is not None]
            if not pairs:
                continue
            ahead = [(f - r) * 1e3 for r, f in pairs if f is not None]
            later = quantiles(
                (r - b) * 1e3
                for r, b in zip(load.readout_s, base.first_token_s if base else [], strict=False)
                if r is not None and b is not None
            )
            rows.append(
                (
                    f"{rate:g}",
                    SERVED[name].title,
                    str(len(pairs)),
                    f"{statistics.median(ahead):.3f}",
                    f"{sum(a < 0 for a in ahead)}",
                    "" if later is None else f"{later[0]:.3f}",
                    *within_goal(load, later),
                )
            )
    if not rows:
        return []
    head = ["requests/s", "variant", "readouts", "ahead of the first token, p50 ms", "behind it"]
    head += ["later than vLLM's first token, p50 ms", f"within {goals.READOUT_MS:g} ms of their step's end", "goal"]
    return [f"### {model}: readouts of the prompt, at the client", "", *table(head, rows)]


def within_goal(load: Load, later: tuple[float, float] | None) -> tuple[str, str]:
    """Part of the readouts that were in the API server in time, and whether that is half of them; of runs from before
    that was counted, the bound in its place."""
    goal_ms = goals.READOUT_MS
    share = courier.share_within(goal_ms / 1e3, load.lags)
    if share is not None:
        return f"{share:.1%}", f"p50 ≤ {goal_ms:g} ms: {'met' if share >= 0.5 else '**missed**'}"
    return "", "" if later is None else goals.at_most(later[0], goal_ms)


def memory_section(results: Mapping[str, Any]) -> list[str]:
    """Device memory after start, with KV caches of the same size."""
    rows = []
    engines = {
        key: answer["worker"] for key, answer in results["engines"].items() if "allocated_bytes" in answer["worker"]
    }
    for key, worker in engines.items():
        model, name = key.split("/")
        base = engines.get(f"{model}/{BASE}")
        beside = (worker["allocated_bytes"] - base["allocated_bytes"]) / 2**20 if base else None
        judged = name == "mia" and beside is not None
        rows.append(
            (
                model,
                name,
                f"{worker['allocated_bytes'] / 2**20:.0f}",
                f"{worker['reserved_bytes'] / 2**20:.0f}",
                "" if beside is None or name == BASE else f"{beside:+.1f}",
                goals.at_most(beside, goals.MEMORY_MIB) if judged and beside is not None else "",
                f"{worker['cudagraph_mode']}, {worker['runner'].rsplit('.', 2)[-2]}",
            )
        )
    if not rows:
        return []
    head = ("model", "engine", "tensors MiB", "allocator MiB", "beside vLLM's MiB", "goal", "mode")
    return ["### Device memory", "", *table(head, rows)]


def about_section(results: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        f"Run of {results['time']}, commit {results['commit']}, {results['wall_s']:.0f} s in all.",
        "",
        f"- Card: {results['card'].replace(chr(10), '; ')}; {results['cpus']} processors. {versions}.",
        f"- Command: `{' '.join(results['command'])}`",
    ]
    if results["options"]["quick"]:
        lines.append("- A rehearsal with a handful of tokens: it shows that everything runs, and measures nothing.")
    for model, taps in results["taps"].items():
        heads = ", ".join(f"{layer}.{head}" for layer, head in taps["attention_heads"])
        lines.append(
            f"- Taps of {model}: hidden states after layers {', '.join(map(str, taps['hidden_layers']))}; attention of "
            f"heads (layer.head) {heads}; steering after layer {taps['steering_layer']}."
        )
    for key, answer in results["steering_changed"].items():
        lines.append(f"- {key}: steering changed {answer['changed']} of {answer['of']} answers.")
    for what, reason in results["failures"].items():
        last = reason.strip().splitlines()[-1] if reason.strip() else "no reason"
        lines.append(f"- Failed or left out: {what}: `{last[:200]}`")
    return [*lines, ""]


def sections(results: Mapping[str, Any]) -> list[str]:
    """The page's part for one run, as lines."""
    return [
        *about_section(results),
        *offline_sections(results),
        *device_sections(results),
        *served_sections(results),
        *memory_section(results),
    ]


def write_page(page: Path, runs: Sequence[tuple[str, Mapping[str, Any]]], plot: Path | None) -> None:
    """Put all runs between the page's markers. Raises ``ValueError`` when it has none."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no {BEGIN} and {END}")
    lines = ["" if plot is None else f"![ratios to vLLM]({plot.name})", ""]
    for name, results in runs:
        lines += [f"## {name}", "", *sections(results)]
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    page.write_text(before + BEGIN + "\n" + "\n".join(lines).strip() + "\n" + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--compact", action="store_true", help="print instead of writing the page")
    options = parser.parse_args()
    try:
        runs = [(file.stem, json.loads(file.read_text())) for file in options.file]
    except (OSError, ValueError) as error:
        parser.error(f"{error}")
    if options.compact:
        for _, results in runs:
            print("\n".join(compact(results)))
        return
    from bench.plot import draw

    draw(dict(runs), PLOT)
    write_page(PAGE, runs, PLOT)
    print(f"written: {PAGE} and {PLOT}")


if __name__ == "__main__":
    main()
