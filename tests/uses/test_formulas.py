"""The arithmetic of the uses on numbers that can be followed by hand. Against models: tests/engine."""

from __future__ import annotations

import numpy as np
import pytest

from guard.data import data_folder
from guard.mia.results import AttentionReadout, Readouts, RowsReadout
from guard.mia.spec import MAX_SPEC_BYTES, parse_spec
from guard.uses import rerank, schema_linking
from guard.uses.asking import Told
from guard.uses.hidden_states import extract
from guard.uses.linking_head import LabelledQuestion, average_precision, read_scores
from guard.uses.parts import MAX_TEXTS, UnreadableError, ranges_of, spans_of
from guard.uses.reranker_heads import LabelledQuery, best_heads, contrastive_scores, document_mass
from guard.uses.schema_linking import Column, choose


def test_a_token_far_below_its_documents_mean_does_not_count() -> None:
    flat, nothing = np.full(20, 0.01), np.zeros(20)
    with_outlier = flat.copy()
    with_outlier[7] = -1.0
    scores = rerank.document_scores([flat, with_outlier], [nothing, nothing])
    assert scores == pytest.approx([0.2, 0.19])
    # What "N/A" draws as well is gone; a document of one token is its token.
    assert rerank.document_scores([flat, np.array([0.5])], [flat, np.array([0.2])]) == pytest.approx([0.0, 0.3])
    with pytest.raises(UnreadableError, match="other tokens"):
        rerank.document_scores([flat], [flat[1:]])


def test_equal_scores_stay_in_the_order_in_which_they_came() -> None:
    ranked = rerank.rank(np.array([0.4, 0.8, 0.4]), heads=2)
    assert [(one.index, one.score) for one in ranked] == [(1, 0.4), (0, 0.2), (2, 0.2)]


def test_a_head_is_scored_by_the_share_that_the_relevant_document_has() -> None:
    mass = [np.array([[0.2, 0.1], [0.1, 0.2]]), np.array([[0.3, 0.1], [0.1, 0.1]])]
    scores = contrastive_scores(mass, [0, 0], temperature=0.1)
    first = np.mean([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-2))])
    second = np.mean([1 / (1 + np.exp(1)), 0.5])
    assert scores == pytest.approx([first, second])
    assert best_heads(scores, [(1, 0), (2, 5)], 1) == [(1, 0)]


def test_the_shortest_run_of_likely_columns_is_chosen() -> None:
    scores = np.array([0.1, 0.6, 0.3])
    assert choose(scores, top_p=0.5).selected == (1,)
    assert choose(scores, top_p=0.7).selected == (1, 2)
    assert choose(scores, top_p=1).selected == choose(scores).ranking == (1, 2, 0)
    assert choose(scores, temperature=0.25, top_p=0.9).selected == (1,)
    assert choose(np.zeros(3), top_p=0.5).selected == (0, 1)
    for wrong in (
        {"temperature": 0.0},
        {"temperature": 1e-308},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            choose(scores, **wrong)


def test_average_precision_is_the_mean_precision_at_the_needed_columns() -> None:
    assert average_precision(np.array([0.9, 0.1, 0.8, 0.2]), frozenset({0, 3})) == pytest.approx((1 + 2 / 3) / 2)
    with pytest.raises(ValueError, match="at least one"):
        average_precision(np.zeros(2), frozenset())


def test_texts_that_run_together_are_an_error_and_not_a_wrong_score() -> None:
    readouts = Readouts(
        {}, {"texts.0": ((3, 5), (6, 9)), "texts.10": ((40, 41),), "texts.2": ((20, 22),), "query": ((50, 52),)}
    )
    assert ranges_of(readouts, 4) == [(3, 5), (6, 9), (20, 22), (40, 41)]
    with pytest.raises(UnreadableError, match="4 of the 5"):
        ranges_of(readouts, 5)
    dropped = AttentionReadout("dropped", ((1, 0),), reason="no room")
    with pytest.raises(UnreadableError, match="dropped no room"):
        rerank.token_attention(Readouts({"attention": dropped}, readouts.span_tokens), 4)


def test_what_cannot_be_read_is_named_with_its_number_and_the_reason() -> None:
    good = Told("", (Readouts({"layer1": RowsReadout("complete", 1, (0,), values=np.ones((1, 4), np.float32))}),))
    bad = Told("", (Readouts({"layer1": RowsReadout("dropped", 1, reason="no room")}),))
    with pytest.raises(UnreadableError, match=r"^conversation 1: the readout 'layer1' is missing: dropped no room$"):
        extract(lambda asked, max_tokens=1: [good, bad], [[], []], [1])
    dropped = Told("", (Readouts({"attention": AttentionReadout("dropped", ((1, 0),), reason="no room")}),))
    with pytest.raises(UnreadableError, match=r"^query 0: .+ dropped no room"):
        document_mass(lambda asked, max_tokens=1: [dropped], [(1, 0)], [LabelledQuery("q", ("a", "b"), 0)])
    link = Told("", (Readouts({"link": AttentionReadout("dropped", ((1, 0),), reason="no room")}),))
    asked = [LabelledQuestion("q", frozenset({0}))]
    with pytest.raises(UnreadableError, match=r"^question 0: .+ dropped no room"):
        read_scores(lambda asked, max_tokens=1: [link], [(1, 0)], asked, [Column("a", "b")])


def test_no_layer_is_an_error_and_not_an_empty_result() -> None:
    with pytest.raises(ValueError, match="no layer"):
        extract(lambda asked, max_tokens=1: [Told("", ())], [[]], [])


def test_the_largest_specs_are_ones_that_engines_take() -> None:
    heads = [(layer, head) for layer in range(1, 33) for head in range(32)]
    for spec in (rerank.spec_for(heads, MAX_TEXTS), schema_linking.spec_for(heads, MAX_TEXTS)):
        wire = spec.to_wire()
        assert len(wire) < MAX_SPEC_BYTES
        assert parse_spec(wire) == spec
    with pytest.raises(ValueError, match=f"{MAX_TEXTS + 1} texts"):
        spans_of(range(MAX_TEXTS + 1))


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        *((blank, "is blank") for blank in ("", " \n", "\u200b", "\ufeff \u2060", "\0", "\u3164", "\u2800", "\ufe0f")),
        *((half, "half of a surrogate pair") for half in ("\ud800", "a\udfffb")),
    ],
)
def test_texts_with_nothing_to_read_and_halves_of_characters_are_refused_by_name(text: str, mistake: str) -> None:
    column = Column("a", "b")
    for name, made in (
        ("the query", lambda: rerank.prompt(text, ["a"])),
        ("document 1", lambda: rerank.prompt("q", ["a", text])),
        ("the question", lambda: schema_linking.prompt(text, [column])),
        ("the name of column 1", lambda: schema_linking.prompt("q", [column, Column(text, "b")])),
        ("the table of column 0", lambda: schema_linking.prompt("q", [Column("a", text)])),
    ):
        with pytest.raises(ValueError, match=f"^{name} .*{mistake}"):
            made()


@pytest.mark.parametrize("text", ["a", " a\u200b", "❤\ufe0f", "\u0301", "नि", "\U0001f468\u200d\U0001f469"])
def test_whatever_can_be_seen_is_a_text(text: str) -> None:
    assert rerank.prompt(text, [text])


@pytest.mark.parametrize("separator", ["\n- ", "\r", "\u2028", "\x0b"])
def test_columns_that_are_there_twice_or_would_read_as_two_are_refused(separator: str) -> None:
    with pytest.raises(ValueError, match=r"^the name of column 0 has more than one line$"):
        schema_linking.prompt("q", [Column(f"x{separator}z@y", "b")])
    with pytest.raises(ValueError, match=r"^the table of column 1 has more than one line$"):
        schema_linking.prompt("q", [Column("a", "b"), Column("a", f"b{separator}c")])
    with pytest.raises(ValueError, match=r"^column 1 is there twice: a@b@c$"):
        schema_linking.prompt("q", [Column("a@b", "c"), Column("a", "b@c")])


def test_the_shipped_heads_were_measured() -> None:
    config = rerank.load_reranker(data_folder("model_configs") / "core_reranker" / "SmolLM2-135M-Instruct.json")
    assert len(config.heads) == 8
    assert config.heads[0] == (19, 6)
    assert config.measured is not None
