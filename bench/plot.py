"""The plot: each variant's time per output token as a ratio to vLLM, with its spread and its goal. Of each model one
run, that of the newest day with the most variants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import goals
from bench.ratios import Case, Ratio, paired, per_token_ms
from bench.variants import VARIANTS

SHOWN = (0.97, 1.10)
"""Ratios beyond are written at the edge."""


Points = list[tuple[str, int, Ratio]]
"""Variant, requests at once and ratio, in the order of the variants."""


def points(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Points]]:
    """By model, the run's name with them. runs: by name."""
    newest: dict[str, tuple[tuple[str, int], str, Points]] = {}
    for name, results in runs.items():
        for model, some in _points(results).items():
            rank = (results["time"][:10], len({variant for variant, _, _ in some}))
            if model not in newest or rank > newest[model][0]:
                newest[model] = rank, name, some
    return {model: (name, some) for model, (_, name, some) in newest.items()}


def _points(results: Mapping[str, Any]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for case, by_variant in per_token_ms(results["rows"], "tpot").items():
        found.setdefault(case.model, []).extend(_ratios(case, by_variant))
    order = list(VARIANTS)
    return {model: sorted(some, key=lambda one: (order.index(one[0]), one[1])) for model, some in found.items()}


def _ratios(case: Case, by_variant: Mapping[str, Any]) -> list[tuple[str, int, Ratio]]:
    base = by_variant.get("vanilla", {})
    ratios = [(name, paired(rounds, base)) for name, rounds in by_variant.items() if name != "vanilla"]
    return [(name, case.requests, ratio) for name, ratio in ratios if ratio is not None]


def draw(runs: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Write the SVG. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    # The same numbers give the same bytes.
    matplotlib.rcParams.update({"svg.hashsalt": "mia", "svg.fonttype": "none"})
    models = points(runs)
    tallest = max((len(some) for _, some in models.values()), default=1)
    figure = Figure(figsize=(6.5 * max(1, len(models)), 1.2 + 0.24 * tallest), layout="constrained")
    for i, (model, (run, some)) in enumerate(models.items()):
        axes: Any = figure.add_subplot(1, len(models), i + 1)
        for y, (name, _, ratio) in enumerate(some):
            _mark(axes, y, ratio, goals.PER_TOKEN.get(name))
        axes.set_yticks(range(len(some)), [f"{name} {requests}" for name, requests, _ in some], fontsize=7)
        axes.set(xlim=SHOWN, ylim=(len(some) - 0.5, -0.5), title=f"{model}, {run}")
        axes.set_xlabel("time per output token / vLLM's (bar: least to most; red: goal)")
        axes.axvline(1.0, color="black", linewidth=0.6)
    figure.savefig(file, format="svg", metadata={"Date": None})


def _mark(axes: Any, y: int, ratio: Ratio, goal: float | None) -> None:
    low, high = SHOWN
    if ratio.middle > high:
        axes.annotate(f"{ratio.middle:.2f} ▶", (high, y), ha="right", va="center", fontsize=7)
    else:
        axes.plot([max(low, ratio.low), min(high, ratio.high)], [y, y], color="tab:blue", linewidth=1.2)
        axes.plot([ratio.middle], [y], "o", color="tab:blue", markersize=3.5)
    if goal is not None:
        axes.plot([goal, goal], [y - 0.35, y + 0.35], color="tab:red", linewidth=1.4)
