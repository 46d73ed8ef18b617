"""Reading the named sets."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from detectors.calibration import sources
from detectors.calibration.data_cli import data_app
from detectors.calibration.row_counts import counted, recorded
from detectors.calibration.sets.catalogue import INSTALLED, SETS
from detectors.calibration.sets.long_benign import NAME
from detectors.calibration.sources import DataError, bastion_texts, own_prompts, spikee_jailbreaks
from detectors.calibration.wheels import WHEELS, wheel_path
from detectors.probe import Probe
from guard.data import data_folder


def test_a_set_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sources, "version", missing)
    with pytest.raises(DataError, match=r"bastioncorpus is not installed.*mia-guard\[calibrate\]"):
        bastion_texts()


def test_bastioncorpus_keeps_its_traps_benign_and_its_indirect_attacks_pasted() -> None:
    texts = bastion_texts()
    assert len(texts) == 181
    assert sum(text.label == "benign" for text in texts) == 63
    assert all(text.pasted for text in texts if text.id.startswith("bastion-ind-canary"))


def test_every_jailbreak_of_spikee_has_a_place_for_its_instruction() -> None:
    jailbreaks = spikee_jailbreaks()
    assert len({seed.family for seed in jailbreaks}) > 15
    assert all("<INSTRUCTION>" in seed.text for seed in jailbreaks)


def test_our_own_prompts_are_different_texts_in_several_languages() -> None:
    prompts = own_prompts()
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert len({prompt.lang for prompt in prompts}) > 4


def test_recorded_counts_of_rows_are_those_that_the_sets_give() -> None:
    here = [name for name in SETS if name in INSTALLED or (name in WHEELS and wheel_path(name).is_file())]
    assert counted(here) == {name: recorded()[name] for name in here}
    assert recorded().keys() == {*SETS, NAME}


def test_recorded_counts_are_those_that_the_shipped_probe_was_calibrated_on() -> None:
    calibration = Probe.load(data_folder("model_configs") / "probe" / "SmolLM2-135M-Instruct.json").config.calibration
    assert calibration is not None
    assert {
        source.name: {label: sum(rows.get(label, 0) for rows in source.rows.values()) for label in ("benign", "attack")}
        for source in calibration.data
    } == {name: counts for name, counts in recorded().items() if name != NAME}


def test_every_card_and_the_list_say_how_many_rows_there_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text(encoding="utf-8")
    told = CliRunner().invoke(data_app, ["list"]).output
    for name, counts in recorded().items():
        card = page.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert f"- Rows: {counts['benign']:,} benign, {counts['attack']:,} attacks." in card
        assert re.search(rf"^{name} .* {counts['benign']} benign, +{counts['attack']} attacks ", told, re.MULTILINE)
