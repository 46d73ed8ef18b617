"""Which setting is recommended, what a stopped sweep goes on from, and how options and pictures spell settings."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from guard.steering.heat_map import Cell, heat_map
from guard.steering.measures import make_measure
from guard.steering.report import plot
from guard.steering.rows import Prompts
from guard.steering.settings import SettingsError, chosen_layers, parse_coefficients, parse_layers
from guard.steering.sweep import Result, Sweep, Trial, kept_trials, write_trials
from guard.steering.vector_files import VectorNameError, checked_name

UNSTEERED = Trial(0, 0.0, effect=0.1, perplexity=2.0, distinct=0.9, dose=0.0, example="a")
MILD = Trial(4, 1.0, effect=0.5, perplexity=3.0, distinct=0.9, dose=0.4, example="b")
STRONG = Trial(8, 2.0, effect=0.9, perplexity=5.0, distinct=0.85, dose=0.8, example="c")
SALAD = Trial(8, 3.0, effect=1.0, perplexity=40.0, distinct=1.0, dose=1.2, example="d")
LOOP = Trial(4, 3.0, effect=1.0, perplexity=1.2, distinct=0.2, dose=1.2, example="e")


def result(*trials: Trial, factor: float = 3.0) -> Result:
    return Result(UNSTEERED, trials, factor)


def test_the_strongest_effect_within_the_limits_wins_over_word_salad_and_loops() -> None:
    assert result(MILD, STRONG, SALAD, LOOP).recommended == STRONG
    assert result(MILD, STRONG, SALAD, LOOP, factor=2.0).recommended == MILD


def test_of_equals_the_gentlest_wins() -> None:
    assert result(replace(STRONG, effect=0.5), MILD).recommended == MILD


def test_nothing_is_recommended_where_nothing_helps() -> None:
    assert result(SALAD, LOOP, replace(MILD, effect=0.1)).recommended is None


def test_trials_are_kept_for_the_same_sweep_and_for_no_other(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "sweep.json"
    silent = replace(MILD, perplexity=math.inf)
    write_trials(file, "key", [UNSTEERED, silent], {"model": "m"})
    assert kept_trials(file, "key") == [UNSTEERED, silent]
    assert kept_trials(file, "other") == []
    file.write_text("{")
    assert kept_trials(file, "key") == []
    assert kept_trials(tmp_path / "none.json", "key") == []


def test_the_plot_shows_every_setting_frames_the_best_and_strikes_out_what_is_beyond() -> None:
    trials = (replace(MILD, coefficient=2.0), replace(LOOP, coefficient=3.0), STRONG, SALAD)
    sweep = Sweep("x", (4, 8), (2.0, 3.0), "both", 8, Prompts((), ""), make_measure("pattern:<&>"), 3.0)
    tree = ElementTree.fromstring(plot(sweep, result(*trials)))  # noqa: S314 - written here
    tags = [element.tag.rpartition("}")[2] for element in tree.iter()]
    texts = [element.text for element in tree.iter() if element.text and element.text.strip()]
    assert tags.count("path") == 2
    assert {"0.50", "0.90", "1.00", "ppl 3.0", "ppl 40.0", "layer 4", "layer 8", "x: pattern:<&>"} <= set(texts)
    framed = [e for e in tree.iter() if e.get("fill") == "none" and e.tag.endswith("rect")]
    assert len(framed) == 1


def test_a_heat_map_of_equal_values_can_be_drawn() -> None:
    assert ElementTree.fromstring(heat_map("t", ["r"], ["c"], [[Cell(0.0, "0")]])) is not None  # noqa: S314


@pytest.mark.parametrize(
    ("text", "layers"), [(None, (2, 4, 6, 8, 10, 12)), ("all", tuple(range(1, 13))), ("7, 2-4,3", (2, 3, 4, 7))]
)
def test_layers_as_options_spell_them(text: str | None, layers: tuple[int, ...]) -> None:
    assert parse_layers(text, 12) == layers


@pytest.mark.parametrize("text", ["0", "13", "5-3", "a", "", "1,,2", "-1"])
def test_layers_that_the_model_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_layers(text, 12)


def test_coefficients_are_numbers_and_not_nothing() -> None:
    assert parse_coefficients("0.5, -1,2,2") == (0.5, -1.0, 2.0)
    for text in ("", "a", "0", "1,0", "inf", "nan"):
        with pytest.raises(SettingsError):
            parse_coefficients(text)


def test_a_sweep_is_of_the_layers_that_the_vector_was_learnt_at(tmp_path: Path) -> None:
    for name in ("x-12.safetensors", "x-4.safetensors", "x-y.safetensors", "xx-5.safetensors"):
        (tmp_path / name).touch()
    assert chosen_layers(tmp_path, "x", None) == (4, 12)
    assert chosen_layers(tmp_path, "x", "4") == (4,)
    with pytest.raises(SettingsError, match="learnt at layers 4, 12; not 5"):
        chosen_layers(tmp_path, "x", "5")
    with pytest.raises(VectorNameError, match="guard steer learn z"):
        chosen_layers(tmp_path, "z", None)


@pytest.mark.parametrize("name", ["a/b", "../x", "a b", "x" * 62])
def test_a_name_that_no_vector_can_have_is_refused(name: str) -> None:
    assert checked_name("a.b_c-d", (30,)) == "a.b_c-d"
    with pytest.raises(VectorNameError):
        checked_name(name, (30,))
