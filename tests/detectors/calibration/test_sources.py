"""Reading the named sets."""

from __future__ import annotations

import importlib.metadata

import pytest

from detectors.calibration import sources
from detectors.calibration.sources import DataError, bastion_texts, own_prompts, spikee_jailbreaks


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
