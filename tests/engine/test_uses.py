"""Reranking and schema linking against the same formulas on what transformers computes, on a tiny random model.

The model is granite: its attention has a scale of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.uses import linking_head, rerank, reranker_heads, schema_linking
from guard.uses.asking import Ask, Messages, offline
from guard.uses.reranker_heads import LabelledQuery
from guard.uses.schema_linking import Column
from tests.engine import engines, oracle

HEADS = tuple((layer, head) for layer in (1, 2, 3) for head in range(4))
CHOSEN = ((1, 2), (3, 0), (3, 3))
QUERY = "Which bird is small?"
DOCUMENTS = [
    "A wren weighs ten grams.",
    "The ostrich cannot fly.\n",
    "Ships are built of steel.",
    "The ostrich cannot fly.",
]
COLUMNS = [Column("name", "bird"), Column("weight_g", "bird"), Column("id", "ship")]
QUESTION = "How heavy is a wren?"


@dataclass
class Engine:
    """``ask`` remembers what it asked in ``asked``, so that the truth is about the same tokens."""

    llm: MiaLLM
    folder: Path

    @property
    def ask(self) -> Ask:
        return offline(self.llm)

    def attention(self, messages: Messages) -> tuple[str, list[np.ndarray]]:
        """The prompt as the model gets it and transformers' attention by layer - 1, ``[heads, T, T]``."""
        content = "\n".join(part["text"] for part in messages[0]["content"])
        text = self.llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        ids = self.llm.tokenizer.encode(text, add_special_tokens=False)
        (reading,) = oracle.read(self.folder, [ids])
        # As many characters as tokens.
        return text.replace("<|start|>", "^").replace("<|end|>", "$"), reading.attention


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = oracle.save("granite", tmp_path_factory.mktemp("tiny-granite"))
    config = EngineConfig(attention_heads=HEADS, max_query_rows_per_step=512)
    with engines.engine(folder, config, max_model_len=2048) as llm:
        yield Engine(llm, folder)


def places(text: str, parts: list[str]) -> list[slice]:
    """Where each part lies, each behind the one before; one token a byte. What the template trims is not there."""
    found, at = [], 0
    for part in parts:
        at = text.index(part, at)
        found.append(slice(at, at + len(part)))
        at += len(part)
    return found


def true_token_attention(engine: Engine, query: str, heads: tuple[tuple[int, int], ...]) -> list[np.ndarray]:
    """For each document ``[heads, tokens]``."""
    text, attention = engine.attention(rerank.prompt(query, DOCUMENTS))
    *documents, asked = places(text, [*DOCUMENTS, query])
    rows = np.stack([attention[layer - 1][head, asked].mean(axis=0) for layer, head in heads])
    return [rows[:, document] for document in documents]


def true_scores(engine: Engine, heads: tuple[tuple[int, int], ...]) -> list[float]:
    asked, blank = (true_token_attention(engine, query, heads) for query in (QUERY, "N/A"))
    scores = []
    for with_query, without in zip(asked, blank, strict=True):
        gained = with_query.sum(axis=0) - without.sum(axis=0)
        kept = [c for c in gained if c > gained.mean() - 2 * gained.std()]
        scores.append(sum(kept) / len(heads))
    return scores


def test_documents_are_ranked_by_what_transformers_attention_says(engine: Engine) -> None:
    ranked = rerank.rerank(engine.ask, CHOSEN, QUERY, DOCUMENTS)
    truth = true_scores(engine, CHOSEN)
    assert [one.index for one in ranked] == sorted(range(4), key=lambda i: -truth[i])
    assert [one.score for one in ranked] == pytest.approx(sorted(truth, reverse=True), abs=1e-5)
    assert max(truth) - min(truth) > 1e-3


def test_only_the_chosen_heads_count(engine: Engine) -> None:
    ranked = {one.index: one.score for one in rerank.rerank(engine.ask, CHOSEN[:1], QUERY, DOCUMENTS)}
    assert list(ranked[i] for i in range(4)) == pytest.approx(true_scores(engine, CHOSEN[:1]), abs=1e-5)
    assert ranked[0] != pytest.approx(true_scores(engine, HEADS[8:])[0], abs=1e-4)


def test_ranking_again_from_a_warm_prefix_cache_gives_the_same(engine: Engine) -> None:
    assert engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    first, again = (rerank.rerank(engine.ask, CHOSEN, QUERY, DOCUMENTS) for _ in range(2))
    assert [one.score for one in again] == pytest.approx([one.score for one in first], abs=1e-6)


def test_many_more_documents_than_spans_are_told_apart(engine: Engine) -> None:
    documents = [chr(97 + i % 26) for i in range(150)]
    ranked = rerank.rerank(engine.ask, CHOSEN, QUERY, documents)
    assert sorted(one.index for one in ranked) == list(range(150))
    with pytest.raises(ValueError, match="241 texts"):
        rerank.rerank(engine.ask, CHOSEN, QUERY, ["a"] * (rerank.MAX_DOCUMENTS + 1))
    with pytest.raises(ValueError, match="document 1 is blank"):
        rerank.rerank(engine.ask, CHOSEN, QUERY, ["a", " \n"])


def test_heads_are_scored_by_the_share_of_the_relevant_document(engine: Engine) -> None:
    queries = [LabelledQuery(QUERY, tuple(DOCUMENTS), relevant) for relevant in (0, 2)]
    scores = reranker_heads.contrastive_scores(
        reranker_heads.document_mass(engine.ask, HEADS, queries), [0, 2], temperature=0.01
    )
    mass = np.stack([document.sum(axis=1) for document in true_token_attention(engine, QUERY, HEADS)], axis=1)
    weights = np.exp(mass / 0.01)
    shares = weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(scores, shares[:, [0, 2]].mean(axis=1), atol=1e-4)
    best = reranker_heads.best_heads(scores, HEADS, 2)
    assert best == [HEADS[i] for i in np.argsort(-scores)[:2]]


def test_columns_are_chosen_by_what_transformers_attention_says(engine: Engine) -> None:
    linked = schema_linking.link(engine.ask, (3, 1), QUESTION, COLUMNS, temperature=0.5, top_p=0.6)
    text, attention = engine.attention(schema_linking.prompt(QUESTION, COLUMNS))
    columns = places(text, [column.text for column in COLUMNS])
    truth = np.array([attention[2][1, -1, column].mean() for column in columns])
    np.testing.assert_allclose(linked.scores, truth, atol=1e-6)
    weights = (truth + 1e-8) ** 2
    np.testing.assert_allclose(linked.probabilities, weights / weights.sum(), rtol=1e-3)
    reached, chosen = 0.0, []
    for i in np.argsort(-weights):
        chosen.append(i)
        reached += weights[i] / weights.sum()
        if reached >= 0.6:
            break
    assert linked.selected == tuple(chosen)


def test_the_head_is_the_one_that_ranks_labelled_questions_best(engine: Engine) -> None:
    questions = [
        linking_head.LabelledQuestion(QUESTION, frozenset({1})),
        linking_head.LabelledQuestion("Ships?", frozenset({2})),
    ]
    scores = linking_head.read_scores(engine.ask, HEADS, questions, COLUMNS)
    qualities = linking_head.head_qualities(scores, HEADS, questions)
    assert [one.head for one in qualities] != list(HEADS)
    best = HEADS.index(qualities[0].head)
    ranks = [1 + int((scores[q, best] > scores[q, best, i]).sum()) for q, i in enumerate((1, 2))]
    assert qualities[0].average_precision == pytest.approx(np.mean([1 / rank for rank in ranks]))
