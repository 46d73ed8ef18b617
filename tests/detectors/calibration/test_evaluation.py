"""The evaluation: slices, folds and the report, on rows with planted scores."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from detectors.attention_tracker import AttentionTracker
from detectors.calibration.eval_report import html
from detectors.calibration.evaluation import Rated, as_json, bucket_of, measured, report_of
from detectors.calibration.feature_store import FeatureError
from detectors.calibration.features import Features
from detectors.calibration.leave_one_out import fold, leave_one_out
from detectors.calibration.probe_candidates import Choice
from detectors.calibration.rows import Row, default_rows
from detectors.calibration.scoring import scores_of
from detectors.probe import Probe
from guard.data import data_folder


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return default_rows(seed=0)[::3]


def rated(rows: list[Row], attacks_higher_by: float) -> Rated:
    noise = np.random.default_rng(0).normal(size=len(rows))
    attack = np.array([row.label == "attack" for row in rows])
    tokens = np.array([len(row.text) / 4 for row in rows], np.float32)
    return Rated(rows, noise + attacks_higher_by * attack, tokens)


def test_a_report_counts_every_slice_and_the_hard_negatives(rows: list[Row]) -> None:
    held_out = [row for row in rows if row.split == "held_out"]
    report = report_of(rated(held_out, 3.0), {"fpr_1pct": 2.5}, seed=0)
    assert report.pooled.auroc > 0.95
    assert report.pooled.attack == sum(row.label == "attack" for row in held_out)
    assert {"own", "spikee"} <= set(report.slices["set"])
    assert report.slices["language"]["en"].benign_from == "itself"
    at = report.thresholds["fpr_1pct"]
    assert at.false_positives_of["hard negatives"].rows == sum(row.hard for row in held_out)
    assert at.caught.rows == report.pooled.attack
    assert at.caught.interval[0] < at.caught.hits / at.caught.rows < at.caught.interval[1]
    assert sum(report.curve.benign) + sum(report.curve.attack) == len(held_out)
    assert report.curve.roc[-1] == (1.0, 1.0)


def test_position_rows_count_at_thresholds_and_nowhere_in_the_pool(rows: list[Row]) -> None:
    held_out = [row for row in rows if row.split == "held_out"]
    attacks = [row for row in held_out if row.label == "attack"][:12]
    placed = [
        replace(row, id=f"positions-tool-1200-{i}-end", source="positions", place="tool", position="end")
        for i, row in enumerate(attacks)
    ]
    alone = report_of(rated(held_out, 3.0), {"t": 0.0}, seed=0)
    both = report_of(rated([*held_out, *placed], 3.0), {"t": 0.0}, seed=0)
    assert both.pooled.attack == alone.pooled.attack
    caught, before = both.thresholds["t"].caught_of, alone.thresholds["t"].caught_of
    assert caught["positions, 1200 characters, end"].rows == 12
    # As the report says of them: not in a language or a place as a whole; in its end, and in lengths.
    assert caught["language en"].rows == before["language en"].rows
    assert "place tool" not in caught or caught["place tool"].rows == before["place tool"].rows
    assert caught["place tool, end"].rows >= 12
    of_length = [sum(hits.rows for name, hits in at.items() if name.startswith("length ")) for at in (caught, before)]
    assert of_length[0] >= of_length[1] + 12
    assert "The set positions" in html({"model": "m"}, {"probe": both})


def test_measures_have_intervals_around_them(rows: list[Row]) -> None:
    one = rated(rows, 1.5)
    found = measured(one.scores, one.labels, one.groups, 0, 200)
    for value, (low, high) in (
        (found.auroc, found.auroc_interval),
        (found.auprc, found.auprc_interval),
        (found.tpr_1pct, found.tpr_1pct_interval),
    ):
        assert low <= value <= high
        assert low < high
    assert found.tpr_0_1pct <= found.tpr_1pct


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, "0 to 63 tokens"), (64, "64 to 127 tokens"), (5000, "from 4096 tokens")]
)
def test_lengths_fall_into_one_bucket(tokens: float, bucket: str) -> None:
    assert bucket_of(tokens) == bucket


@pytest.mark.parametrize("source", ["bastioncorpus", "own", "spikee"])
def test_a_set_that_is_left_out_is_in_no_training_row_nor_is_what_shares_a_group_with_it(
    rows: list[Row], source: str
) -> None:
    shared = replace(next(row for row in rows if row.source != source), group="shared", split="train", id="stranger")
    own = replace(next(row for row in rows if row.source == source), group="shared", id="ours")
    everything = [*rows, shared, own]
    train, validation, test = fold(everything, source)
    for index in (train, validation):
        assert source not in {everything[i].source for i in index}
        assert "shared" not in {everything[i].group for i in index}
    assert {row.id for row in everything if row.source == source} <= {everything[i].id for i in test}
    strangers = [everything[i] for i in test if everything[i].source != source]
    assert {row.split for row in strangers} == {"held_out"}
    assert len({row.label for row in strangers}) == 1


def test_leaving_out_finds_a_signal_that_all_sets_share_and_none_that_only_one_has(rows: list[Row]) -> None:
    attack = np.array([row.label == "attack" for row in rows])
    of_spikee = np.array([row.source == "spikee" for row in rows])

    def found(signal: np.ndarray) -> float:
        hidden = np.random.default_rng(0).normal(size=(len(rows), 1, 8)).astype(np.float32)
        hidden[:, 0, 2] += 4.0 * signal
        nothing = np.zeros((len(rows), 0, 2), np.float32)
        features = Features((1,), (), hidden, nothing, (), hidden[:, :0], np.ones(len(rows), np.float32))
        return leave_one_out(rows, features, Choice("last_token", (1,)), 0)["probe"]["bastioncorpus"].auroc

    assert found(attack) > 0.95
    assert found(attack & of_spikee) < 0.7


def test_shipped_detectors_score_kept_features_as_they_score_readouts() -> None:
    key = "SmolLM2-135M-Instruct.json"
    probe = Probe.load(data_folder("model_configs") / "probe" / key)
    tracker = AttentionTracker.load(data_folder("model_configs") / "attention_tracker" / key)
    generator = np.random.default_rng(0)
    layers = tuple(range(1, 31))
    heads = tuple((layer, head) for layer in layers for head in range(9))
    features = Features(
        layers,
        heads,
        generator.normal(size=(4, 30, 576)).astype(np.float32),
        generator.uniform(0.1, 0.4, size=(4, len(heads), 2)).astype(np.float32),
        (),
        np.zeros((4, 0, 576), np.float32),
        np.ones(4, np.float32),
    )
    chosen = features.hidden[:, [layers.index(layer) for layer in probe.config.params.layers]].reshape(4, -1)
    expected = 1 / (1 + np.exp(-(chosen.astype(np.float64) @ probe.weight + probe.bias)))
    assert scores_of(probe, features) == pytest.approx(expected, rel=1e-6)
    at = [heads.index(head) for head in tracker.heads]
    mass = features.mass[:, at].astype(np.float64)
    assert scores_of(tracker, features) == pytest.approx(1 - (mass[..., 0] / mass.sum(axis=-1)).mean(axis=1), rel=1e-5)
    few = features.part(np.arange(4))
    with pytest.raises(FeatureError, match="not among what is kept"):
        scores_of(probe, replace(few, layers=(99,) * 30))


def test_attention_that_is_not_kept_is_no_feature() -> None:
    tracker = AttentionTracker.load(data_folder("model_configs") / "attention_tracker" / "SmolLM2-135M-Instruct.json")
    hidden = np.random.default_rng(0).normal(size=(3, 30, 576)).astype(np.float32)
    mass = np.full((3, len(tracker.heads), 2), 0.3, np.float32)
    features = Features(tuple(range(1, 31)), tracker.heads, hidden, mass, (), hidden[:, :0], np.ones(3, np.float32))
    later = tracker.config.model_copy(
        update={"params": tracker.config.params.model_copy(update={"generated_tokens": 2})}
    )
    with pytest.raises(FeatureError, match="attention from generated tokens is not among what is kept"):
        scores_of(AttentionTracker(later), features)


class Tags(HTMLParser):
    """Checks that tags close in order; collects addresses and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "rect", "line", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line", "polyline"):
            assert self.open.pop() == tag


def test_the_html_report_is_whole_self_contained_and_has_no_text_of_a_row(rows: list[Row], tmp_path: Path) -> None:
    held_out = [row for row in rows if row.split == "held_out"]
    report = report_of(rated(held_out, 2.0), {"fpr_1pct": 2.5}, seed=0)
    page = html({"model": "a <model>", "date": "today"}, {"probe": report, "text & baseline": report})
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.outside == []
    assert "<script" not in page
    assert page.count("<svg") == 3
    assert "a &lt;model&gt;" in page
    assert "text &amp; baseline" in page
    assert "Not to be trusted" not in page
    doubted = replace(report, remarks=("3 rows <were> seen",))
    assert "Not to be trusted</h2>\n<ul class=warning><li>probe: 3 rows &lt;were&gt; seen" in html(
        {"model": "m"}, {"probe": doubted}
    )
    assert as_json(doubted)["remarks"] == ("3 rows <were> seen",)
    content = page + json.dumps(as_json(report))
    assert not [row.id for row in held_out if len(row.text) > 20 and row.text[:40] in content]
