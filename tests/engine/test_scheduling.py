"""Exact under what a scheduler does: preemption, aborts, several choices, and many requests that each ask otherwise."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import Answer, MiaLLM
from guard.mia.results import (
    AttentionReadout,
    AttentionRowsReadout,
    HiddenMeanReadout,
    ProbeReadout,
    QKReadout,
    Readouts,
    RowsReadout,
)
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle

LAYERS = (0, 1, 2, 3)
HEADS = tuple((layer, head) for layer in (1, 2, 3) for head in range(4))
BLOCK_TOKENS = 32
READINGS = {
    "spans": {"data": "user.last", "head": {"tokens": [[0, 6], [9, 11]]}},
    "hidden": {
        "all": {"layer": 2, "positions": "all"},
        "embedding": {"layer": 0, "positions": "all"},
        "span": {"layer": 1, "positions": {"span": "data"}},
        "middle": {"layer": 2, "positions": {"span": "data"}, "average": True},
        "last": {"layer": 3},
    },
    "probes": {"risk": {"probe": "risk", "positions": "all"}, "now": {"probe": "risk", "positions": "generated"}},
    "attention": {
        "share": {"heads": HEADS, "spans": ["data"], "weights": True},
        "mean": {"heads": HEADS, "spans": ["head"], "weights": True, "positions": {"span": "data"}},
        "rows": {"heads": HEADS, "spans": ["data", "head"], "weights": True, "positions": "generated"},
    },
    "qk": {"raw": {"heads": HEADS, "positions": "all"}},
}
COEFFICIENT = 0.4


@dataclass
class Parts:
    """What engines are made of here, and what their steering and probe are."""

    folder: Path
    config: EngineConfig
    push: np.ndarray
    weight: np.ndarray
    bias: np.ndarray


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    vectors, probes = tmp_path_factory.mktemp("vectors"), tmp_path_factory.mktemp("probes")
    generator = torch.Generator().manual_seed(0)
    push, pull, weight, bias = (torch.randn(size, generator=generator) for size in ((128,), (128,), (1, 128), (1,)))
    save_file({"vector": push}, vectors / "push.safetensors")
    save_file({"vector": pull}, vectors / "pull.safetensors")
    save_file({"weight": weight, "bias": bias}, probes / "risk.safetensors")
    config = EngineConfig(
        hidden_layers=LAYERS,
        attention_heads=HEADS,
        max_hidden_rows_per_step=1024,
        max_query_rows_per_step=1024,
        steering_layers=(1, 2, 3),
        steering_folder=vectors,
        steering_vectors=("push", "pull"),
        probe_folder=probes,
        probes={"risk": 2},
    )
    folder = oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))
    return Parts(folder, config, push.numpy(), weight.numpy(), bias.numpy())


@pytest.fixture(scope="module")
def small_pool(parts: Parts) -> Iterator[MiaLLM]:
    """Room for ten blocks of 32 tokens: requests push each other out as their answers grow."""
    block_bytes = BLOCK_TOKENS * 2 * 2 * 32 * 4 * 3
    pool = {"kv_cache_memory_bytes": 10 * block_bytes, "block_size": BLOCK_TOKENS, "max_model_len": 256}
    with engines.engine(parts.folder, parts.config, disable_log_stats=False, **pool) as llm:
        yield llm


@pytest.fixture(scope="module")
def roomy(parts: Parts) -> Iterator[MiaLLM]:
    with engines.engine(parts.folder, parts.config, max_num_batched_tokens=512, max_num_seqs=64) as llm:
        yield llm


def conversation(n: int, words: int | None = None) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{n} " + "tell me a story " * (3 + n % 7 if words is None else words)}]


def with_gate(**threshold: float) -> MiaSpec:
    """``READINGS``, and a push of the generated tokens from where the probe crosses a threshold."""
    steer = {"vector": "push", "layer": 1, "coefficient": COEFFICIENT, "phase": "decode"}
    return MiaSpec.model_validate({**READINGS, "steer": [{**steer, "gate": {"readout": "now", **threshold}}]})


def crossing(answer: Answer) -> dict[str, float]:
    """A threshold that a token of this answer is the first to cross, and as late as can be."""
    risk = answer.items["now"]
    assert isinstance(risk, ProbeReadout)
    for side, values in (("above", risk.logits[:, 0]), ("below", -risk.logits[:, 0])):
        before = np.maximum.accumulate(values)[:-1]
        if len(records := np.flatnonzero(values[1:] > before)):
            middle = float((values[1:][records[-1]] + before[records[-1]]) / 2)
            return {side: middle if side == "above" else -middle}
    raise AssertionError("the probe says the same of every token")


def router_of(llm: MiaLLM) -> Any:
    executor = llm.llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner.mia.router


def preemptions(llm: MiaLLM) -> float:
    return next(m.value for m in llm.llm.get_metrics() if m.name == "vllm:num_preemptions")


def assert_same_values(name: str, a: Any, b: Any) -> None:
    if isinstance(a, np.ndarray):
        shares = name in ("mass", "weights")
        np.testing.assert_allclose(a, b, rtol=0 if shares else 1e-3, atol=1e-4 if shares else 2e-3)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_values(name, a[key], b[key])
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-6)
    else:
        assert a == b


def assert_same(a: Answer, b: Answer) -> None:
    """The same tokens, and every field of every readout and report alike."""
    assert a.token_ids == b.token_ids
    assert [(one.stage, one.items.keys()) for one in a.readouts] == [
        (one.stage, one.items.keys()) for one in b.readouts
    ]
    for mine, other in zip(a.readouts, b.readouts, strict=True):
        for name, item in mine.items.items():
            assert item.status == "complete", (name, item.reason)
            for field in fields(item):
                assert_same_values(field.name, getattr(item, field.name), getattr(other.items[name], field.name))
        for one, another in zip(mine.steering, other.steering, strict=True):
            for field in fields(one):
                assert_same_values(field.name, getattr(one, field.name), getattr(another, field.name))


def assert_exact(parts: Parts, prompt: Readouts, final: Readouts, ids: tuple[int, ...]) -> None:
    """One choice of a request with ``READINGS`` that steers by ``push`` from where its gate opened. ids: as fed."""
    (report,) = final.steering
    length = prompt.prompt_tokens
    opened_at = len(ids) if report.opened_at is None else report.opened_at
    assert report.steered_tokens == len(ids) - opened_at
    push = oracle.Push(1, COEFFICIENT, parts.push, positions=tuple(range(opened_at, len(ids))))
    (truth,) = oracle.read(parts.folder, [ids], push)
    items = {**prompt.items, **final.items}
    assert {item.status for item in items.values()} == {"complete"}
    rows, embedding, risk = items["all"], items["embedding"], items["risk"]
    assert isinstance(rows, RowsReadout)
    assert isinstance(embedding, RowsReadout)
    assert isinstance(risk, ProbeReadout)
    assert rows.positions == embedding.positions == risk.positions == tuple(range(len(ids)))
    assert rows.token_ids == ids
    errors = np.linalg.norm(rows.values - truth.hidden[1], axis=1)
    assert (errors <= 1e-4 * np.linalg.norm(truth.hidden[1], axis=1)).all()
    np.testing.assert_allclose(embedding.values, truth.embedding, atol=1e-5)
    np.testing.assert_allclose(risk.logits, truth.hidden[1] @ parts.weight.T + parts.bias, rtol=1e-3, atol=1e-2)
    attention = np.stack([truth.attention[layer - 1][head] for layer, head in HEADS])
    data = [t for start, end in prompt.span_tokens["data"] for t in range(start, end)]
    middle = items["middle"]
    assert isinstance(middle, HiddenMeanReadout)
    assert middle.tokens == prompt.span_tokens["data"]
    np.testing.assert_allclose(middle.values, rows.values[data].mean(axis=0, dtype=np.float64), rtol=1e-6, atol=1e-6)
    last, mean, grown, raw = items["share"], items["mean"], items["rows"], items["raw"]
    assert isinstance(mean, AttentionReadout)
    assert isinstance(grown, AttentionRowsReadout)
    assert isinstance(raw, QKReadout)
    assert isinstance(last, AttentionReadout)
    np.testing.assert_allclose(last.weights, attention[:, length - 1, :length], atol=1e-4)
    np.testing.assert_allclose(mean.weights, attention[:, data, :length].mean(axis=1), atol=1e-4)
    np.testing.assert_allclose(grown.weights, attention[:, length:].transpose(1, 0, 2), atol=1e-4)
    assert grown.positions == tuple(range(length, len(ids)))
    assert raw.positions == tuple(range(len(ids)))
    assert {len(keys) for keys in raw.keys.values()} == {len(ids)}


def test_preempted_requests_lose_nothing_and_give_nothing_twice(parts: Parts, small_pool: MiaLLM) -> None:
    """Keys that grow with the answer, probes and gates among it: all is computed again, and was read before."""
    conversations = [conversation(n, 2 + n % 3) for n in range(5)]
    sampling = {"max_tokens": 48, "ignore_eos": True}
    plain = [small_pool.chat([one], MiaSpec.model_validate(READINGS), **sampling)[0] for one in conversations]
    before = preemptions(small_pool)
    together = small_pool.chat(conversations, [with_gate(**crossing(answer)) for answer in plain], **sampling)
    assert preemptions(small_pool) > before
    for answer, alone in zip(together, plain, strict=True):
        prompt, final = answer.readouts
        assert final.steering[0].opened_at is not None
        assert_exact(parts, prompt, final, answer.prompt_token_ids + answer.token_ids[:-1])
        opened = final.steering[0].opened_at - len(answer.prompt_token_ids)
        # The token at which the gate is crossed was chosen before it opened.
        assert answer.token_ids[: opened + 1] == alone.token_ids[: opened + 1]


def test_an_aborted_request_leaves_nothing_behind(small_pool: MiaLLM) -> None:
    from vllm import SamplingParams
    from vllm.renderers.params import ChatParams

    from guard.mia.frontend import RequestContext, active, prepare

    engine: Any = small_pool.llm.llm_engine
    renderer = small_pool.llm.renderer
    chat_params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
    offsets = replace(renderer.default_chat_tok_params, return_token_offsets=True)
    context = RequestContext(with_gate(above=-1e9), small_pool.vectors())
    with active(context):
        _, (prompt,) = renderer.render_chat([conversation(3)], chat_params, offsets)
        prompt, params = prepare(context, prompt, SamplingParams(max_tokens=80, ignore_eos=True), "doomed")
        engine.add_request("doomed", prompt, params)
    for _ in range(5):
        engine.step()
    (tracked,) = router_of(small_pool).requests.values()
    (slot,) = tracked.gates.values()
    router = router_of(small_pool)
    assert int(router._buffers.opened_at[slot]) == tracked.prompt_len + 1
    assert router.gathers_keys == (tracked.keys is not None)
    engine.abort_request(["doomed"])
    small_pool.chat([conversation(1)], MiaSpec(), max_tokens=2)
    assert router_of(small_pool).requests == {}
    assert router_of(small_pool)._host_bytes == 0


def test_every_choice_is_read_and_gated_by_its_own_tokens(parts: Parts, roomy: MiaLLM) -> None:
    sampling = {"n": 4, "temperature": 1.0, "seed": 5, "max_tokens": 10, "ignore_eos": True}
    (plain,) = roomy.chat([conversation(2)], MiaSpec.model_validate(READINGS), **sampling)
    seen = [one.items["now"].logits for one in plain.readouts if one.stage == "final"]
    (answer,) = roomy.chat(
        [conversation(2)], with_gate(above=float(np.quantile(np.concatenate(seen), 0.8))), **sampling
    )
    prompts = {one.choice_index: one for one in answer.readouts if one.stage == "prompt"}
    finals = {one.choice_index: one for one in answer.readouts if one.stage == "final"}
    assert sorted(prompts) == sorted(finals) == [0, 1, 2, 3]
    for choice, final in finals.items():
        assert_exact(parts, prompts[choice], final, final.items["all"].token_ids)
    assert len({final.items["all"].token_ids for final in finals.values()}) == 4
    assert len({final.steering[0].opened_at for final in finals.values()}) > 1


def test_structured_output_and_logprobs_go_together_with_gated_steering(parts: Parts, roomy: MiaLLM) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    sampling: dict[str, Any] = {
        "structured_outputs": StructuredOutputsParams(regex="(yes|no|perhaps), [a-f]{8}"),
        "logprobs": 2,
        "max_tokens": 24,
    }
    conversations = [conversation(n) for n in range(3)]
    plain = roomy.chat(conversations, MiaSpec.model_validate(READINGS), **sampling)
    specs = [with_gate(**crossing(answer)) for answer in plain]
    together = roomy.chat(conversations, specs, **sampling)
    for one, spec, answer, unsteered in zip(conversations, specs, together, plain, strict=True):
        assert re.fullmatch("(yes|no|perhaps), [a-f]{8}", answer.text)
        prompt, final = answer.readouts
        assert_exact(parts, prompt, final, answer.prompt_token_ids + answer.token_ids[:-1])
        assert final.steering[0].steered_tokens > 0
        assert answer.cumulative_logprob is not None
        assert answer.cumulative_logprob != pytest.approx(unsteered.cumulative_logprob, abs=1e-3)
        (alone,) = roomy.chat([one], spec, **sampling)
        assert answer.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
        assert_same(answer, alone)


def random_capture(random_: random.Random, kind: str) -> dict[str, Any]:
    everywhere = ["last_prompt", "prompt", "generated", "all", {"span": "data"}, {"tokens": [[1, 4], [6, 9]]}]
    if kind == "hidden":
        return {"layer": random_.choice(LAYERS), "positions": random_.choice(everywhere)}
    if kind == "probes":
        return {"probe": "risk", "positions": random_.choice(everywhere)}
    heads = random_.sample(HEADS, random_.randint(1, 5))
    if kind == "qk":
        return {"heads": heads, "positions": random_.choice(everywhere)}
    return {
        "heads": heads,
        "spans": random_.sample(["data", "head"], random_.randint(1, 2)),
        "weights": random_.random() < 0.5,
        "positions": random_.choice(["last_prompt", "generated", {"span": "data"}, {"tokens": [[2, 5]]}]),
    }


def random_spec(random_: random.Random) -> MiaSpec:
    """Any mixture of captures and steering; a gate where there is a readout for it."""
    spec: dict[str, Any] = {"spans": {"data": "user.last", "head": {"tokens": [[0, 5]]}}}
    for kind in ("hidden", "probes", "attention", "qk"):
        spec[kind] = {f"{kind}{i}": random_capture(random_, kind) for i in range(random_.randint(0, 2))}
    gates: list[dict[str, Any]] = [
        {"readout": name, random_.choice(["above", "below"]): 0.5} for name in spec["probes"]
    ]
    gates += [
        {"readout": name, "span": capture["spans"][0], random_.choice(["above", "below"]): 0.1}
        for name, capture in spec["attention"].items()
    ]
    spec["steer"] = []
    for _ in range(random_.randint(0, 3)):
        method = random_.choice(["add_vector", "project", "ablate", "replace"])
        steer = {
            "vector": random_.choice(["push", "pull"]),
            "layer": random_.choice([1, 2, 3]),
            "coefficient": random_.choice([-0.5, 0.3, 1.0]),
            "method": method,
            "preserve_norm": random_.random() < 0.3,
            "positions": random_.choice(["all", "last", {"tokens": [[3, 9], [40, 500]]}]),
            "phase": random_.choice(["prefill", "decode", "both"]),
        }
        if method == "project":
            steer["target"] = 2.0
        if gates and random_.random() < 0.5:
            steer |= {"gate": random_.choice(gates), "phase": "decode"}
        spec["steer"].append(steer)
    return MiaSpec.model_validate(spec)


def test_64_requests_that_each_ask_for_something_else_are_as_alone(roomy: MiaLLM) -> None:
    random_ = random.Random(0)  # noqa: S311 - seeded, so that a failure can be repeated
    specs = [random_spec(random_) for _ in range(64)]
    conversations = [conversation(n) for n in range(64)]
    together = roomy.chat(conversations, specs, max_tokens=6, ignore_eos=True)
    alone = [
        roomy.chat([one], spec, max_tokens=6, ignore_eos=True)[0]
        for one, spec in zip(conversations, specs, strict=True)
    ]
    for a, b in zip(together, alone, strict=True):
        assert_same(a, b)
    reports = [report for answer in together for one in answer.readouts for report in one.steering]
    gated = [steer.gate is not None for spec in specs for steer in spec.steer]
    opened = [report.opened_at is not None for report, gate in zip(reports, gated, strict=True) if gate]
    # Every kind of capture was there, and gates that opened as well as gates that did not.
    assert {item.kind for answer in together for item in answer.items.values()} == {
        *("hidden", "rows", "probe", "attention", "attention_rows", "qk")
    }
    assert any(opened)
    assert not all(opened)
