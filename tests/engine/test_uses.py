"""The uses against the same formulas on what transformers computes, on a tiny random model: reranking, schema linking,
extraction of hidden states, and every detector that reads the model, without the guard.

The model is granite: its attention has a scale of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from detectors.attention_tracker import focus_scores
from detectors.science_prompt import LABELS, PROMPT_SHA256
from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.spec import MiaSpec, Positions, SpanPositions
from guard.uses import linking_head, rerank, reranker_heads, schema_linking
from guard.uses.asking import Ask, Messages, offline
from guard.uses.detectors_offline import score, score_claims, spec_of, taps_for
from guard.uses.hidden_states import Reduction, extract
from guard.uses.reranker_heads import LabelledQuery
from guard.uses.schema_linking import Column
from tests.detectors.weights import build
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
CHAT: Messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why is the sky blue?"}]
SIZE = 128


@dataclass
class Engine:
    """``ask`` remembers what it asked in ``asked``, so that the truth is about the same tokens."""

    llm: MiaLLM
    folder: Path

    @property
    def ask(self) -> Ask:
        return offline(self.llm)

    def told(self, messages: Messages, max_tokens: int = 1) -> tuple[int, oracle.Reading]:
        """How many tokens the prompt has, and transformers' reading of it with the answer but for its last token."""
        (answer,) = self.llm.chat([messages], MiaSpec(), max_tokens=max_tokens)
        ids = [*answer.prompt_token_ids, *answer.token_ids[:-1]]
        (reading,) = oracle.read(self.folder, [ids])
        return len(answer.prompt_token_ids), reading

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
    config = EngineConfig(
        hidden_layers=(0, 1, 2, 3),
        attention_heads=HEADS,
        max_query_rows_per_step=512,
        max_hidden_rows_per_step="tokens",
    )
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


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 10


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-logits)))


def test_hidden_states_of_any_layers_and_tokens_are_transformers_own_and_reduced_as_said(engine: Engine) -> None:
    length, truth = engine.told(CHAT, max_tokens=6)
    layers = (0, 2, 3)
    asked: list[tuple[Positions, Reduction]] = [
        ("last_prompt", "none"),
        ("prompt", "none"),
        (SpanPositions(span="user"), "mean"),
        ("prompt", "norm"),
        ("generated", "none"),
    ]
    last, prompt, mean, norm, generated = (
        extract(engine.ask, [CHAT], layers, positions, reduce, spans={"user": ("user",)}, max_tokens=6)[0]
        for positions, reduce in asked
    )
    for layer in layers:
        stream = truth.stream(layer)
        begin = length - len("$\n^assistant\n") - len(CHAT[1]["content"])
        expected = {
            "last": (last, stream[length - 1 : length]),
            "prompt": (prompt, stream[:length]),
            "mean": (mean, stream[begin : begin + len(CHAT[1]["content"])].mean(axis=0)),
            "norm": (norm, np.linalg.norm(stream[:length])),
            "generated": (generated, stream[length:]),
        }
        for name, (got, wanted) in expected.items():
            assert got[layer].shape == wanted.shape, name
            np.testing.assert_allclose(got[layer], wanted, rtol=1e-4, atol=1e-4, err_msg=name)
    with pytest.raises(ValueError, match="none, mean, norm"):
        extract(engine.ask, [CHAT], layers, reduce="sum")  # type: ignore[arg-type]


def test_an_answer_of_one_token_has_no_states_and_leaves_the_others_theirs(engine: Engine) -> None:
    # There is room for one token behind it.
    long = [{"role": "user", "content": "a" * (2047 - engine.told([{"role": "user", "content": ""}])[0])}]
    for reduce, empty in (("none", np.zeros((0, SIZE))), ("mean", np.full(SIZE, np.nan)), ("norm", np.zeros(()))):
        short, whole = extract(engine.ask, [long, CHAT], [0, 3], "generated", reduce, max_tokens=6)  # type: ignore[arg-type]
        for layer in (0, 3):
            np.testing.assert_array_equal(short[layer], empty)
            assert np.isfinite(whole[layer]).all()
    assert whole[3] > 0
    # Nothing was read at all, so that no record of it leaves the worker.
    assert [one[3].shape for one in extract(engine.ask, [CHAT, CHAT], [3], "generated")] == [(0, SIZE)] * 2


def test_detectors_of_prompts_score_what_transformers_states_give(engine: Engine, tmp_path: Path) -> None:
    length, truth = engine.told(CHAT)
    weight, bias = random(1, 2 * SIZE), random(2, 1)
    given = {"layers": [1, 3], "hidden_size": SIZE}
    logit = np.concatenate([truth.stream(layer)[length - 1] for layer in (1, 3)]) @ weight + bias[0]
    for kind in ("probe", "tool_call_risk"):
        detector = build(tmp_path / kind, kind, {"weight": weight, "bias": bias}, **given)
        (scored,) = score(engine.ask, detector, [CHAT])
        assert scored.score.value == pytest.approx(float(sigmoid(logit)), abs=1e-4), kind
    tracker = build(tmp_path / "tracker", "attention_tracker", important_heads=[[0, 2], [2, 1]])
    (scored,) = score(engine.ask, tracker, [CHAT])
    user = slice(length - len("$\n^assistant\n") - len(CHAT[1]["content"]), length - len("$\n^assistant\n"))
    system = slice(len("^system\n"), len("^system\n") + len(CHAT[0]["content"]))
    rows = np.stack([truth.attention[layer][head, length - 1] for layer, head in ((0, 2), (2, 1))])
    focus = focus_scores(rows[:, system].sum(axis=1), rows[:, user].sum(axis=1))
    assert scored.score.value == pytest.approx(1 - float(focus.mean()), abs=1e-4)
    assert taps_for([detector, tracker]).attention_heads == ((1, 2), (3, 1))
    assert spec_of(tracker).spans.keys() == {"instruction", "data"}


def test_h_node_scores_the_tokens_of_the_answer(engine: Engine, tmp_path: Path) -> None:
    length, truth = engine.told(CHAT, max_tokens=7)
    tensors = {
        "weight": random(3, SIZE),
        "bias": random(4, 1),
        "mean": random(5, SIZE),
        "scale": np.abs(random(6, SIZE)) + 1,
        "node_indices": np.array([3, 50]),
        "node_baselines": random(7, 2),
    }
    detector = build(tmp_path, "h_node", tensors, layer=2, hidden_size=SIZE, nodes=2)
    (scored,) = score(engine.ask, detector, [CHAT], max_tokens=7)
    states = truth.stream(2)[length:]
    logits = (states - tensors["mean"]) / tensors["scale"] @ tensors["weight"] + tensors["bias"]
    assert scored.score.value == pytest.approx(float(sigmoid(logits).max()), abs=1e-4)
    excess = np.maximum(states[int(logits.argmax()), [3, 50]] - tensors["node_baselines"], 0).mean()
    assert dict(scored.score.details)["excess"] == pytest.approx(float(excess), abs=1e-4)


def test_claims_are_checked_by_what_the_model_makes_of_their_conversation(engine: Engine, tmp_path: Path) -> None:
    tensors = {"weight": random(8, 3, SIZE), "bias": random(9, 3), "norm_gain": 1 + random(10, SIZE)}
    detector = build(
        tmp_path,
        "science_hallucination",
        tensors,
        layer=3,
        hidden_size=SIZE,
        norm_eps=1e-5,
        prompt_sha256=PROMPT_SHA256,
    )
    reference = {"reference": "There was ice."}
    nothing, blank, checked = score_claims(
        engine.ask, detector, [("Claim.", {}), ("\u200b ", reference), ("It froze.", reference)]
    )
    assert (nothing.status, nothing.reason) == ("unavailable", "there is no reference to check the answer against")
    assert (blank.status, blank.reason) == ("unavailable", "there is no claim to check")
    assert [one.status for one in score_claims(engine.ask, detector, [("", reference)])] == ["unavailable"]
    with pytest.raises(ValueError, match=r"^the text of claim 1 has half of a surrogate pair"):
        score_claims(engine.ask, detector, [("Claim.", {}), ("\ud800", reference)])
    passed = detector.second_pass("It froze.", {"reference": "There was ice."})
    length, truth = engine.told([dict(one) for one in passed.messages])
    state = truth.stream(3)[length - 1].astype(np.float64)
    normed = state / np.sqrt((state**2).mean() + 1e-5) * tensors["norm_gain"]
    logits = tensors["weight"] @ normed + tensors["bias"]
    shares = np.exp(logits) / np.exp(logits).sum()
    assert dict(checked.details) == pytest.approx(dict(zip(LABELS, shares, strict=True)), abs=1e-4)
    assert checked.value == pytest.approx(1 - shares[0], abs=1e-4)
