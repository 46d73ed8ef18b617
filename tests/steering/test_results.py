"""Figures and plots of steering in the docs are those of the recorded sweeps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from guard.steering.measures import make_measure
from guard.steering.report import plot
from guard.steering.rows import Prompts
from guard.steering.sweep import Result, Sweep, kept_trials

CHECKOUT = Path(__file__).parents[2]
PAGES = CHECKOUT / "docs" / "use-cases"
RECORDED = {"french": "steering-language.md", "list": "instruction-following.md"}


def recorded(name: str) -> tuple[Sweep, Result]:
    file = CHECKOUT / "bench" / "results" / f"smollm2-135m-steering-{name}.json"
    raw = json.loads(file.read_text())
    unsteered, *trials = sorted(kept_trials(file, raw["key"]), key=lambda one: (one.layer, one.coefficient))
    layers = tuple(sorted({one.layer for one in trials}))
    coefficients = tuple(sorted({one.coefficient for one in trials}))
    limits = (raw["phase"], raw["max_tokens"], Prompts((), ""), make_measure(raw["measure"]), raw["perplexity_factor"])
    result = Result(unsteered, tuple(trials), raw["perplexity_factor"])
    assert result.recommended is not None
    assert raw["recommended"] == {"layer": result.recommended.layer, "coefficient": result.recommended.coefficient}
    return Sweep(raw["vector"], layers, coefficients, *limits), result


@pytest.mark.parametrize("name", RECORDED)
def test_the_plot_in_the_docs_is_of_the_recorded_sweep(name: str) -> None:
    assert (PAGES / f"steering-{name}.svg").read_text() == plot(*recorded(name))


@pytest.mark.parametrize("name", RECORDED)
def test_the_table_in_the_docs_is_of_the_recorded_sweep(name: str) -> None:
    _, result = recorded(name)
    rows = re.findall(r"^\| (\d+|none) \| ([\d.]*) ?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.+) … \|$",
                      (PAGES / RECORDED[name]).read_text(), re.MULTILINE)  # fmt: skip
    assert len(rows) == 6
    for layer, coefficient, *shown, example in rows:
        setting = (0, 0.0) if layer == "none" else (int(layer), float(coefficient))
        (one,) = [one for one in (result.unsteered, *result.trials) if (one.layer, one.coefficient) == setting]
        assert shown == [f"{one.effect:.2f}", f"{one.perplexity:.2f}", f"{one.distinct:.2f}"]
        assert " ".join(one.example.split()).startswith(example)


def test_what_the_docs_say_of_generated_tokens_alone_is_recorded() -> None:
    result = recorded("french-decode")[1]
    assert result.recommended is not None
    (quoted,) = re.findall(r"the vector does less: ([\d.]+) within", (PAGES / RECORDED["french"]).read_text())
    assert quoted == f"{result.recommended.effect:.2f}"
