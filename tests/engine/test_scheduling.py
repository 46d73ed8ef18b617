"""Exact under what a scheduler does: preemption, aborts, and many requests that each ask for something else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import Answer, MiaLLM
from guard.mia.results import AttentionReadout, HiddenReadout, RowsReadout
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle

HEADS = tuple((layer, head) for layer in (1, 2, 3) for head in range(4))
EVERYTHING = MiaSpec.model_validate(
    {
        "spans": {"data": "user.last"},
        "hidden": {"all": {"layer": 2, "positions": "all"}, "last": {"layer": 3}},
        "attention": {"a": {"heads": HEADS, "spans": ["data"]}},
    }
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EngineConfig]:
    vectors = tmp_path_factory.mktemp("vectors")
    for seed, name in enumerate(("push", "pull")):
        save_file(
            {"vector": torch.randn(128, generator=torch.Generator().manual_seed(seed))}, vectors / f"{name}.safetensors"
        )
    config = EngineConfig(
        hidden_layers=(1, 2, 3),
        attention_heads=HEADS,
        max_hidden_rows_per_step=512,
        steering_layers=(1, 2, 3),
        steering_folder=vectors,
        steering_vectors=("push", "pull"),
    )
    return oracle.save("llama", tmp_path_factory.mktemp("tiny-llama")), config


@pytest.fixture(scope="module")
def small_pool(folders: tuple[Path, EngineConfig]) -> Iterator[MiaLLM]:
    """Room for about a dozen blocks of 128 tokens: long answers push each other out."""
    block_bytes = 128 * 2 * 2 * 32 * 4 * 3
    with engines.engine(*folders, kv_cache_memory_bytes=12 * block_bytes, disable_log_stats=False) as llm:
        yield llm


def conversation(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{n} " + "tell me a story " * (3 + n % 7)}]


def router_of(llm: MiaLLM) -> Any:
    executor = llm.llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner.mia.router


def preemptions(llm: MiaLLM) -> float:
    return next(m.value for m in llm.llm.get_metrics() if m.name == "vllm:num_preemptions")


def assert_same_rows(a: RowsReadout, b: RowsReadout) -> None:
    assert (a.status, a.positions, a.token_ids) == ("complete", b.positions, b.token_ids)
    np.testing.assert_allclose(a.values, b.values, rtol=1e-3, atol=1e-3)


def assert_same(a: Answer, b: Answer) -> None:
    assert a.token_ids == b.token_ids
    assert a.items.keys() == b.items.keys()
    for name, item in a.items.items():
        other = b.items[name]
        assert (item.status, other.status) == ("complete", "complete")
        if isinstance(item, RowsReadout) and isinstance(other, RowsReadout):
            assert_same_rows(item, other)
        elif isinstance(item, HiddenReadout) and isinstance(other, HiddenReadout):
            np.testing.assert_allclose(item.values, other.values, rtol=1e-3, atol=1e-3)
        elif isinstance(item, AttentionReadout) and isinstance(other, AttentionReadout):
            for span, mass in item.mass.items():
                np.testing.assert_allclose(mass, other.mass[span], atol=1e-4)


def test_preempted_requests_lose_no_row_and_give_none_twice(small_pool: MiaLLM) -> None:
    conversations = [conversation(n) for n in range(8)]
    sampling = {"max_tokens": 220, "ignore_eos": True}
    alone = [small_pool.chat([one], EVERYTHING, **sampling)[0] for one in conversations]
    before = preemptions(small_pool)
    together = small_pool.chat(conversations, EVERYTHING, **sampling)
    assert preemptions(small_pool) > before
    for a, b in zip(together, alone, strict=True):
        rows = a.items["all"]
        assert isinstance(rows, RowsReadout)
        assert rows.positions == tuple(range(len(a.prompt_token_ids) + len(a.token_ids) - 1))
        assert_same(a, b)


def test_an_aborted_request_leaves_nothing_behind(small_pool: MiaLLM) -> None:
    from vllm import SamplingParams
    from vllm.renderers.params import ChatParams

    from guard.mia.frontend import RequestContext, active, prepare

    engine: Any = small_pool.llm.llm_engine
    chat_params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
    context = RequestContext(MiaSpec.model_validate({"hidden": {"all": {"layer": 2, "positions": "all"}}}))
    with active(context):
        _, (prompt,) = small_pool.llm.renderer.render_chat([conversation(3)], chat_params)
        prompt, params = prepare(context, prompt, SamplingParams(max_tokens=200, ignore_eos=True), "doomed")
        engine.add_request("doomed", prompt, params)
    for _ in range(5):
        engine.step()
    assert len(router_of(small_pool).requests) == 1
    engine.abort_request(["doomed"])
    small_pool.chat([conversation(1)], MiaSpec(), max_tokens=2)
    assert router_of(small_pool).requests == {}
    assert router_of(small_pool)._host_bytes == 0


def random_spec(random_: random.Random) -> MiaSpec:
    layers = random_.sample([1, 2, 3], random_.randint(1, 3))
    positions = ["last_prompt", "prompt", "generated", "all", {"span": "data"}]
    spec: dict[str, Any] = {
        "spans": {"data": "user.last"},
        "hidden": {f"h{n}": {"layer": n, "positions": random_.choice(positions)} for n in layers},
    }
    if random_.random() < 0.5:
        spec["attention"] = {"a": {"heads": random_.sample(HEADS, random_.randint(1, 5)), "spans": ["data"]}}
    spec["steer"] = [
        {
            "vector": random_.choice(["push", "pull"]),
            "layer": random_.choice([1, 2, 3]),
            "coefficient": random_.choice([-2.0, 1.0, 3.0]),
            "method": random_.choice(["add_vector", "ablate", "replace"]),
            "phase": random_.choice(["prefill", "decode", "both"]),
        }
        for _ in range(random_.randint(0, 2))
    ]
    return MiaSpec.model_validate(spec)


def test_64_requests_that_each_ask_for_something_else_are_as_alone(folders: tuple[Path, EngineConfig]) -> None:
    random_ = random.Random(0)  # noqa: S311 - seeded, so that a failure can be repeated
    specs = [random_spec(random_) for _ in range(64)]
    conversations = [conversation(n) for n in range(64)]
    with engines.engine(*folders, max_num_batched_tokens=512, max_num_seqs=64) as llm:
        together = llm.chat(conversations, specs, max_tokens=6, ignore_eos=True)
        alone = [
            llm.chat([one], spec, max_tokens=6, ignore_eos=True)[0]
            for one, spec in zip(conversations, specs, strict=True)
        ]
    for a, b in zip(together, alone, strict=True):
        assert_same(a, b)
