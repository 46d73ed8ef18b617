"""Every detector of the model's insides, through a policy's names and a real engine, against its formula on what
transformers computes in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detectors.base import AnyDetector, Score
from detectors.engine_probes import engine_probes, write_probes
from detectors.science_hallucination import check_claims
from detectors.science_prompt import LABELS, PROMPT_SHA256
from guard.mia.engine_config import EngineConfig
from guard.mia.llm import Answer, MiaLLM
from guard.mia.results import Readouts
from guard.policy.measuring import measurement, question
from guard.policy.schema import DetectorUse
from tests.detectors.weights import build
from tests.engine import engines, oracle

SIZE, LAYERS = 128, (1, 3)
HEADS = ((1, 0), (2, 3), (3, 1))
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hello there " * 12},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "what is it " * 9},
]
TOKENS = 7
RANDOM = np.random.default_rng(5)
WEIGHT = (RANDOM.normal(size=(len(LAYERS), SIZE)) / 8).astype(np.float32)
BIAS = np.array([0.25], np.float32)
H_NODE = {
    "weight": (RANDOM.normal(size=SIZE) / 8).astype(np.float32),
    "bias": np.array([-0.5], np.float32),
    "mean": RANDOM.normal(size=SIZE).astype(np.float32),
    "scale": RANDOM.uniform(0.5, 2, size=SIZE).astype(np.float32),
    "node_indices": np.array([3, 40, 99], np.int64),
    "node_baselines": RANDOM.normal(size=3).astype(np.float32),
}
SCIENCE = {
    "weight": (RANDOM.normal(size=(3, SIZE)) / 8).astype(np.float32),
    "bias": RANDOM.normal(size=3).astype(np.float32),
    "norm_gain": RANDOM.uniform(0.5, 2, size=SIZE).astype(np.float32),
}
LINEAR = {"weight": WEIGHT.reshape(-1), "bias": BIAS}
WHERE = ("guard", "engine")


def detectors(folder: Path) -> dict[str, AnyDetector]:
    made: dict[str, AnyDetector] = {}
    linear = {"layers": LAYERS, "hidden_size": SIZE}
    for where in WHERE:
        in_engine = where == "engine"
        for pooling in ("last_token", "mean", "max"):
            name = f"{pooling}-{where}"
            probe = build(folder / name, "probe", LINEAR, pooling=pooling, **linear)
            made[name] = probe.computed(in_engine=in_engine)
            h_node = build(
                folder / f"h{name}", "h_node", H_NODE, layer=2, hidden_size=SIZE, nodes=3, pooling=pooling
            )  # fmt: skip
            made[f"h{name}"] = h_node.computed(in_engine=in_engine)
        risk = build(folder / f"risk-{where}", "tool_call_risk", LINEAR, **linear)
        made[f"risk-{where}"] = risk.computed(in_engine=in_engine)
        # Which token begins a call is known when the answer is: see the test.
        call = build(folder / f"call-{where}", "tool_call_risk", LINEAR, at="before_call", call_token_ids=[0], **linear)
        made[f"call-{where}"] = call.computed(in_engine=in_engine)
    heads = [[layer - 1, head] for layer, head in HEADS]
    made["focus"] = build(folder / "focus", "attention_tracker", important_heads=heads, generated_tokens=3)
    made["stretches"] = build(folder / "stretches", "attention_tracker", important_heads=heads, windows={})
    return made


@dataclass
class Asked:
    """``truth``: what transformers computes on prompt and answer; ``prompt``: how many tokens the prompt has."""

    made: Mapping[str, AnyDetector]
    llm: MiaLLM
    folder: Path
    answer: Answer
    truth: oracle.Reading
    prompt: int
    scores: Mapping[str, Score]
    readouts: Readouts

    def states(self, layers: tuple[int, ...] = LAYERS) -> np.ndarray:
        """``[tokens, layers, SIZE]``."""
        return np.stack([self.truth.stream(layer) for layer in layers], axis=1).astype(np.float64)

    @property
    def data(self) -> slice:
        ((start, end),) = self.readouts.span_tokens["mean-guard.data"]
        return slice(start, end)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))
    made = detectors(tmp_path_factory.mktemp("files"))
    probes = engine_probes(made.values())
    write_probes(probes.values(), folder / "probes")
    config = EngineConfig(
        hidden_layers=(1, 2, 3),
        attention_heads=HEADS,
        probe_folder=folder / "probes",
        probes={name: probe.layer for name, probe in probes.items()},
        max_hidden_rows_per_step="tokens",
    )
    measured = {name: measurement(name, detector, DetectorUse(kind=detector.kind)) for name, detector in made.items()}
    # The science detector's conversation is long in a tokenizer of bytes.
    with engines.engine(folder, config, max_model_len=2048) as llm:
        # More spans than one request may have, so several requests; greedy, and so all alike.
        first, answers = llm.chat([CHAT], question([], ()).spec, max_tokens=TOKENS, ignore_eos=True)[0], []
        items: dict[str, Any] = {}
        spans: dict[str, Any] = {}
        for one in measured.values():
            (answer,) = llm.chat([CHAT], question([one], ()).spec, max_tokens=TOKENS, ignore_eos=True)
            assert answer.token_ids == first.token_ids
            answers.append(answer)
            items |= answer.items
            for readouts in answer.readouts:
                spans |= readouts.span_tokens
        readouts = Readouts(items, spans)
        (truth,) = oracle.read(folder, [[*first.prompt_token_ids, *first.token_ids[:-1]]])
        scores = {name: one.score(readouts) for name, one in measured.items()}
        yield Asked(made, llm, folder, first, truth, len(first.prompt_token_ids), scores, readouts)


def logistic(logits: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(logits, np.float64)))


@pytest.mark.parametrize("where", WHERE)
def test_a_probe_pools_the_logits_that_transformers_states_give(asked: Asked, where: str) -> None:
    logits = np.einsum("tlh,lh->t", asked.states(), WEIGHT) + BIAS
    data = logits[asked.data]
    assert len(data) > 16, "longer than a chunk would hide a mistake"
    expected = {"last_token": logits[asked.prompt - 1], "mean": data.mean(), "max": data.max()}
    for pooling, logit in expected.items():
        assert asked.scores[f"{pooling}-{where}"].value == pytest.approx(logistic(logit), abs=1e-5)


def test_a_mean_probe_is_the_probe_of_the_mean_state(asked: Asked) -> None:
    mean = asked.states()[asked.data].mean(axis=0)
    assert asked.scores["mean-guard"].value == pytest.approx(logistic((mean * WEIGHT).sum() + BIAS[0]), abs=1e-5)


@pytest.mark.parametrize("where", WHERE)
def test_h_node_is_the_papers_formula_at_each_generated_token(asked: Asked, where: str) -> None:
    x = asked.states((2,))[asked.prompt :, 0]
    assert len(x) == TOKENS - 1, "the last token is never fed to the model"
    p = logistic(((x - H_NODE["mean"]) / H_NODE["scale"]) @ H_NODE["weight"] + H_NODE["bias"][0])
    excess = np.maximum(x[:, H_NODE["node_indices"]] - H_NODE["node_baselines"], 0).mean(axis=1)
    at = int(np.argmax(p))
    expected = {"last_token": (p[-1], excess[-1]), "mean": (p.mean(), excess.mean()), "max": (p[at], excess[at])}
    for pooling, (value, of_nodes) in expected.items():
        score = asked.scores[f"h{pooling}-{where}"]
        assert score.value == pytest.approx(value, abs=1e-5)
        assert dict(score.details)["excess"] == pytest.approx(of_nodes, abs=1e-4)


@pytest.mark.parametrize("where", WHERE)
def test_tool_call_risk_is_read_at_the_token_before_the_call(asked: Asked, tmp_path: Path, where: str) -> None:
    logits = np.einsum("tlh,lh->t", asked.states(), WEIGHT) + BIAS
    assert asked.scores[f"risk-{where}"].value == pytest.approx(logistic(logits[asked.prompt - 1]), abs=1e-5)
    fed = asked.answer.token_ids[:-1]
    own = {name.removeprefix(f"call-{where}."): item for name, item in asked.readouts.items.items()}
    for token in {fed[0], fed[3]}:
        # The same weights, and so the same readouts.
        linear = {"layers": LAYERS, "hidden_size": SIZE, "call_token_ids": [token]}
        risk = build(tmp_path, "tool_call_risk", LINEAR, at="before_call", **linear)
        risk = risk.computed(in_engine=where == "engine")
        before = [asked.prompt + i - 1 for i, one in enumerate(fed) if one == token]
        assert risk.score(own).value == pytest.approx(logistic(logits[before].max()), abs=1e-5)


def test_an_answer_without_a_call_has_no_risk_and_says_so(asked: Asked, tmp_path: Path) -> None:
    unused = next(token for token in range(1000) if token not in asked.answer.token_ids)
    linear = {"layers": LAYERS, "hidden_size": SIZE}
    risk = build(tmp_path, "tool_call_risk", LINEAR, at="before_call", call_token_ids=[unused], **linear)
    own = {name.removeprefix("call-guard."): item for name, item in asked.readouts.items.items()}
    assert risk.score(own) == Score("scored", 0.0, reason="the answer calls no tool")


def attention(asked: Asked) -> np.ndarray:
    """``[heads, from tokens, to tokens]``."""
    return np.stack([asked.truth.attention[layer - 1][head] for layer, head in HEADS]).astype(np.float64)


def test_the_tracker_averages_over_the_last_prompt_token_and_the_first_generated_ones(asked: Asked) -> None:
    weights = attention(asked)
    i, d = (slice(*asked.readouts.span_tokens[f"focus.{span}"][0]) for span in ("instruction", "data"))
    rows = weights[:, asked.prompt - 1 : asked.prompt + 3]
    instruction, data = rows[:, :, i].sum(axis=2), rows[:, :, d].sum(axis=2)
    assert asked.scores["focus"].value == pytest.approx(1 - (instruction / (instruction + data)).mean(), abs=1e-5)


def test_the_trackers_passages_are_the_stretches_of_data_with_most_of_the_attention_on_it(asked: Asked) -> None:
    last = attention(asked)[:, asked.prompt - 1]
    ((start, end),) = asked.readouts.span_tokens["stretches.data"]
    ends = {at: min(at + 64, end) for at in range(start, end, 32)}
    data = last[:, start:end].sum(axis=1)
    shares = {at: (last[:, at:stop].sum(axis=1) / data).mean() for at, stop in ends.items()}
    score = asked.scores["stretches"]
    assert score.value == pytest.approx((data / (data + instruction_of(asked, last))).mean(), abs=1e-5)
    first = score.passages[0]
    assert (first.start, first.end) == (best := max(shares, key=shares.__getitem__), ends[best])
    for one in score.passages:
        assert one.weight == pytest.approx(shares[one.start], abs=1e-4)
    apart = sorted((one.start, one.end) for one in score.passages)
    assert all(a[1] <= b[0] for a, b in pairwise(apart))


def instruction_of(asked: Asked, last: np.ndarray) -> np.ndarray:
    """Of each head, the mass on it."""
    return last[:, slice(*asked.readouts.span_tokens["stretches.instruction"][0])].sum(axis=1)


def test_the_science_classifier_reads_the_normed_last_state_of_its_own_prompt(asked: Asked, tmp_path: Path) -> None:
    science = build(
        tmp_path, "science_hallucination", SCIENCE,
        layer=3, hidden_size=SIZE, norm_eps=1e-5, prompt_sha256=PROMPT_SHA256,
    )  # fmt: skip
    pairs = [("the sky is blue", "it is green"), ("", "it is green")]
    scored, missing = check_claims(science, asked.llm.read, pairs)
    messages = [
        dict(message) for message in science.second_pass("it is green", {"reference": "the sky is blue"}).messages
    ]
    (answer,) = asked.llm.chat([messages], question([], ()).spec, max_tokens=1)
    (truth,) = oracle.read(asked.folder, [answer.prompt_token_ids])
    x = torch.from_numpy(truth.stream(3)[-1]).double()
    normed = torch.nn.functional.rms_norm(x, (SIZE,), torch.from_numpy(SCIENCE["norm_gain"]).double(), 1e-5)
    logits = torch.from_numpy(SCIENCE["weight"]).double() @ normed + torch.from_numpy(SCIENCE["bias"]).double()
    expected = torch.softmax(logits, 0).tolist()
    assert dict(scored.details) == pytest.approx(dict(zip(LABELS, expected, strict=True)), abs=1e-5)
    assert scored.value == pytest.approx(1 - expected[0], abs=1e-5)
    assert missing.status == "unavailable"
    assert "no reference" in missing.reason
