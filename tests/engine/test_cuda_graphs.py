"""Under CUDA graphs: replays read and steer what each step asks for, and give what eager execution gives.

Run on a machine with a GPU, with ``-p tests.engine.graphs_on_cuda`` and the other tests of engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.results import AttentionReadout, HiddenReadout, RowsReadout
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HEADS = tuple((layer, head) for layer in (1, 2, 3) for head in range(4))
CONVERSATIONS = [
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "tell me more " * n}] for n in (1, 4, 9)
]
TOKENS = 24


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    vectors = tmp_path_factory.mktemp("vectors")
    for seed, name in enumerate(("push", "pull")):
        save_file(
            {"vector": torch.randn(128, generator=torch.Generator().manual_seed(seed))}, vectors / f"{name}.safetensors"
        )
    return EngineConfig(
        hidden_layers=(0, 1, 2, 3),
        attention_heads=HEADS,
        max_hidden_rows_per_step=512,
        steering_layers=(1, 2),
        steering_folder=vectors,
        steering_vectors=("push", "pull"),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def graphs(folder: Path, config: EngineConfig) -> Iterator[MiaLLM]:
    with engines.engine(folder, config, compiled=True, disable_log_stats=False) as llm:
        yield llm


def steered(vector: str, coefficient: float) -> MiaSpec:
    return MiaSpec.model_validate(
        {
            "spans": {"data": "user.last"},
            "hidden": {"all": {"layer": 3, "positions": "all"}, "last": {"layer": 1}},
            "attention": {"share": {"heads": HEADS, "spans": ["data"]}},
            "steer": [{"vector": vector, "layer": 2, "coefficient": coefficient}],
        }
    )


def vector_of(config: EngineConfig, name: str) -> np.ndarray:
    from safetensors.numpy import load_file

    assert config.steering_folder is not None
    return load_file(config.steering_folder / f"{name}.safetensors")["vector"]


def compiled() -> dict[str, int]:
    """How many versions there are of each kernel that runs outside of graphs."""
    from guard.mia import kernels

    return {
        one.__name__: sum(len(versions[0]) for versions in one.device_caches.values())
        for one in (kernels._span_mass, kernels._judge_gates)
    }


def test_no_request_waits_until_a_kernel_is_compiled(folder: Path, config: EngineConfig) -> None:
    gate = {"readout": "share", "span": "data", "above": 0.0}
    spec = steered("push", 1.0).model_dump(mode="json")
    spec["steer"] = [{"vector": "push", "layer": 2, "coefficient": 1.0, "phase": "decode", "gate": gate}]
    with engines.engine(folder, config, compiled=True) as llm:
        before = compiled()
        assert all(before.values())
        for conversation in CONVERSATIONS:
            llm.chat([conversation], [MiaSpec.model_validate(spec)], max_tokens=3)
        assert compiled() == before


def test_replays_read_and_steer_what_each_request_asks_for_after_they_were_captured(
    graphs: MiaLLM, folder: Path, config: EngineConfig
) -> None:
    """Other vectors, coefficients and rows in the same graphs; a plain step among them changes nothing."""
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    replays = 0
    replay = ModelCudaGraphManager.run_fullgraph

    def counted(manager: Any, batch: Any) -> Any:
        nonlocal replays
        replays += 1
        return replay(manager, batch)

    seen = []
    with patch.object(ModelCudaGraphManager, "run_fullgraph", counted):
        for name, coefficient in (("push", 0.5), ("pull", -0.7), ("push", 0.0)):
            specs = [steered(name, coefficient * (1 + i)) for i in range(len(CONVERSATIONS))]
            before = replays
            answers = graphs.chat(CONVERSATIONS, specs, max_tokens=TOKENS, ignore_eos=True)
            assert replays - before >= TOKENS - 2
            for i, answer in enumerate(answers):
                ids = answer.prompt_token_ids + answer.token_ids[:-1]
                push = oracle.Push(2, coefficient * (1 + i), vector_of(config, name), positions=tuple(range(len(ids))))
                (truth,) = oracle.read(folder, [ids], *([push] if coefficient else []))
                rows, last, share = answer.items["all"], answer.items["last"], answer.items["share"]
                assert isinstance(rows, RowsReadout)
                assert isinstance(last, HiddenReadout)
                assert isinstance(share, AttentionReadout)
                assert rows.positions == tuple(range(len(ids)))
                assert np.linalg.norm(rows.values - truth.hidden[2]) <= 1e-4 * np.linalg.norm(truth.hidden[2])
                at = len(answer.prompt_token_ids) - 1
                np.testing.assert_allclose(last.values, truth.hidden[0][at], rtol=1e-3, atol=1e-4)
                data = [t for start, end in answer.readouts[0].span_tokens["data"] for t in range(start, end)]
                mass = [truth.attention[layer - 1][head][at, data].sum() for layer, head in HEADS]
                np.testing.assert_allclose(share.mass["data"], mass, atol=1e-4)
            seen.append([answer.token_ids for answer in answers])
    assert seen[0] != seen[1] != seen[2]


def test_attention_of_a_cached_prompt_is_read_without_computing_it_again(graphs: MiaLLM, folder: Path) -> None:
    spec = MiaSpec.model_validate(
        {
            "spans": {"data": "user.last"},
            "attention": {
                "share": {"heads": HEADS, "spans": ["data"]},
                "rows": {"heads": HEADS, "spans": ["data"], "weights": True, "positions": "generated"},
            },
        }
    )
    conversation = [[{"role": "user", "content": "the same long prompt, again and again " * 9}]]
    first, second = (graphs.chat(conversation, spec, max_tokens=6, ignore_eos=True)[0] for _ in range(2))
    assert next(m.value for m in graphs.llm.get_metrics() if m.name == "vllm:prefix_cache_hits") > 0
    (truth,) = oracle.read(folder, [second.prompt_token_ids + second.token_ids[:-1]])
    at = len(second.prompt_token_ids) - 1
    data = [t for start, end in second.readouts[0].span_tokens["data"] for t in range(start, end)]
    mass = [truth.attention[layer - 1][head][at, data].sum() for layer, head in HEADS]
    for answer in (first, second):
        np.testing.assert_allclose(answer.items["share"].mass["data"], mass, atol=1e-4)
    rows = second.items["rows"].weights
    expected = np.stack([truth.attention[layer - 1][head][at + 1 :] for layer, head in HEADS], axis=1)
    np.testing.assert_allclose(rows, expected, atol=1e-4)


def test_graphs_give_what_eager_execution_gives(graphs: MiaLLM, folder: Path, config: EngineConfig) -> None:
    """The last to ask ``graphs``: the other engine's end takes vLLM's groups of processes with it."""
    specs = [steered("push", 0.3 * i) for i in range(len(CONVERSATIONS))]
    replayed = graphs.chat(CONVERSATIONS, specs, max_tokens=TOKENS, ignore_eos=True)
    with patch.dict(engines.OVERRIDES, enforce_eager=True), engines.engine(folder, config) as eager:
        expected = eager.chat(CONVERSATIONS, specs, max_tokens=TOKENS, ignore_eos=True)
    for one, other in zip(replayed, expected, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.items["all"].values, other.items["all"].values, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(one.items["share"].mass["data"], other.items["share"].mass["data"], atol=1e-5)
        assert one.readouts[-1].steering[0].steered_tokens == other.readouts[-1].steering[0].steered_tokens


def test_outside_of_graphs_only_kernels_with_something_to_do_are_launched(folder: Path, config: EngineConfig) -> None:
    """Prompts are computed there, and their launches are what the host is busy with."""
    from guard.mia import kernels

    launched: list[str] = []

    def counted(kernel: Any) -> Any:
        run = kernel.run

        def once(*args: Any, **kwargs: Any) -> Any:
            launched.append(kernel.__name__)
            return run(*args, **kwargs)

        return patch.object(kernel, "run", once)

    def launches(spec: dict[str, Any]) -> dict[str, int]:
        launched.clear()
        (answer,) = eager.chat(CONVERSATIONS[:1], MiaSpec.model_validate(spec), max_tokens=1)
        assert all(item.status == "complete" for item in answer.items.values())
        return {name: launched.count(name) for name in set(launched)}

    with (
        patch.dict(engines.OVERRIDES, enforce_eager=True),
        engines.engine(folder, config) as eager,
        counted(kernels._gather_rows),
        counted(kernels._steer_rows),
    ):
        assert launches({}) == {}
        assert launches({"hidden": {"last": {"layer": 2}}}) == {"_gather_rows": 1}
        share = {"heads": [(1, 0), (3, 2)], "spans": ["data"]}
        assert launches({"spans": {"data": "user.last"}, "attention": {"share": share}}) == {"_gather_rows": 2}
        push = {"vector": "push", "layer": 2, "coefficient": 1.0}
        assert launches({"steer": [push]}) == {"_steer_rows": 1}
        assert launches({}) == {}


def test_bfloat16_is_as_far_off_as_its_rounding(folder: Path, config: EngineConfig) -> None:
    with engines.engine(folder, config, compiled=True, dtype="bfloat16") as llm:
        answers = llm.chat(CONVERSATIONS, steered("push", 0.5), max_tokens=TOKENS, ignore_eos=True)
    for answer in answers:
        ids = answer.prompt_token_ids + answer.token_ids[:-1]
        push = oracle.Push(2, 0.5, vector_of(config, "push"), positions=tuple(range(len(ids))))
        (truth,) = oracle.read(folder, [ids], push)
        rows = answer.items["all"].values
        assert np.linalg.norm(rows - truth.hidden[2]) <= 2e-2 * np.linalg.norm(truth.hidden[2])
