"""A sweep for people: the table that the command prints, the plot beside its file. Owns the look, not the numbers."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from guard.steering.heat_map import Cell, heat_map
from guard.steering.sweep import LEAST_DISTINCT, Result, Sweep, Trial


def table(sweep: Sweep, result: Result) -> Table:
    """A line for each setting; what does not keep to the limits is dim, what is recommended bold."""
    columns = ("layer", "coefficient", "effect", "perplexity", "distinct", "dose", "limits")
    shown = Table(*columns, title=escape(f"{sweep.name}: {sweep.measure.name}"), highlight=False)
    best = result.recommended
    for trial in (result.unsteered, *result.trials):
        fits = result.keeps_to_limits(trial)
        mark = "recommended" if trial == best else "kept" if fits else "beyond"
        shown.add_row(*_cells(trial), mark, style="bold" if trial == best else "" if fits else "dim")
    return shown


def _cells(trial: Trial) -> tuple[str, ...]:
    where = (str(trial.layer), f"{trial.coefficient:g}") if trial.layer else ("none", "")
    numbers = (f"{trial.effect:.3f}", f"{trial.perplexity:.2f}", f"{trial.distinct:.2f}", f"{trial.dose:.2f}")
    return (*where, *numbers)


def plot(sweep: Sweep, result: Result) -> str:
    """SVG: a row for each layer, a column for each coefficient, the effect as colour."""
    by_setting = {(trial.layer, trial.coefficient): trial for trial in result.trials}
    best = result.recommended
    cells = [
        [
            Cell(
                trial.effect,
                f"{trial.effect:.2f}",
                f"ppl {trial.perplexity:.1f}",
                faded=not result.keeps_to_limits(trial),
                framed=trial == best,
            )
            for trial in (by_setting[layer, c] for c in sweep.coefficients)
        ]
        for layer in sweep.layers
    ]
    none = result.unsteered
    return heat_map(
        f"{sweep.name}: {sweep.measure.name}",
        [f"layer {layer}" for layer in sweep.layers],
        [f"{c:g}" for c in sweep.coefficients],
        cells,
        (
            f"columns: coefficient; unsteered: {none.effect:.2f}, ppl {none.perplexity:.1f}; framed: recommended",
            f"struck out: perplexity over {result.perplexity_factor:g} times the unsteered, or more than "
            f"{1 - LEAST_DISTINCT:.0%} fewer distinct word triples",
        ),
    )
