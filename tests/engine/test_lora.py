"""LoRA adapters beside captures and steering: each request is read and steered with the weights that it runs on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.results import AttentionReadout, Readout, Readouts, RowsReadout
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle

RANK, ALPHA, BLOCK_TOKENS = 4, 16, 32
HEADS = tuple((layer, head) for layer in (1, 2, 3) for head in range(4))
PROMPT = [7 * i % 250 for i in range(3 * BLOCK_TOKENS)]
TARGETS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (128, 64),
    "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (128, 192),
    "mlp.up_proj": (128, 192),
    "mlp.down_proj": (192, 128),
}
READ = {
    "hidden": {"h": {"layer": 3, "positions": "all"}},
    "attention": {"a": {"heads": HEADS, "weights": True}},
}
STEER = {"steer": [{"vector": "push", "layer": 1, "coefficient": 0.5}]}


@dataclass
class Request:
    """What one request asks for, and the adapter that it runs on."""

    spec: dict[str, Any]
    adapter: str | None = None
    prompt: tuple[int, ...] = tuple(PROMPT)
    max_tokens: int = 6


@dataclass
class Answer:
    token_ids: tuple[int, ...]
    cached_tokens: int
    readouts: list[Readouts]

    @property
    def items(self) -> dict[str, Readout]:
        return {name: item for one in self.readouts for name, item in one.items.items()}


@dataclass
class Engine:
    """``merged``: folders of the model with one adapter's weights added to its own, by adapter; None: none."""

    llm: MiaLLM
    adapters: dict[str, Path]
    merged: dict[str | None, Path]
    push: np.ndarray

    def run(self, *requests: Request) -> list[Answer]:
        """All of them in flight at once."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        from guard.mia.frontend import RequestContext, active, prepare

        engine: Any = self.llm.llm.llm_engine
        contexts = {}
        for i, request in enumerate(requests):
            id_ = f"lora-{i}"
            context = RequestContext(MiaSpec.model_validate(request.spec), self.llm.vectors())
            params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
            lora = None
            if request.adapter is not None:
                number = 1 + sorted(self.adapters).index(request.adapter)
                lora = LoRARequest(request.adapter, number, str(self.adapters[request.adapter]))
            with active(context):
                prompt = {"type": "token", "prompt_token_ids": list(request.prompt)}
                prompt, params = prepare(context, prompt, params, id_)
                engine.add_request(id_, prompt, params, lora_request=lora)
            contexts[id_] = context
        outputs = self.llm._run()
        return [
            Answer(tuple(outputs[id_].outputs[0].token_ids), outputs[id_].num_cached_tokens, context.take())
            for id_, context in contexts.items()
        ]

    def forget(self) -> None:
        """What the prefix cache holds."""
        assert self.llm.llm.reset_prefix_cache()


def save_adapter(folder: Path, seed: int) -> Path:
    """A random LoRA adapter, as peft writes it."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, (width, height) in TARGETS.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{key}.lora_A.weight"] = 0.07 * torch.randn(RANK, width, generator=generator)
            weights[f"{key}.lora_B.weight"] = 0.07 * torch.randn(height, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".")[1] for name in TARGETS})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """The model with the adapter's weights added to its own."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights, added = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for key in [key for key in added if "lora_A" in key]:
        name = key.removeprefix("base_model.model.").replace("lora_A.", "")
        weights[name] += ALPHA / RANK * added[key.replace("lora_A", "lora_B")] @ added[key]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))
    adapters = {name: save_adapter(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate("AB")}
    merged: dict[str | None, Path] = {None: model}
    merged |= {name: merge(model, path, tmp_path_factory.mktemp(f"merged-{name}")) for name, path in adapters.items()}
    vectors = tmp_path_factory.mktemp("vectors")
    push = torch.randn(128, generator=torch.Generator().manual_seed(1))
    save_file({"vector": push}, vectors / "push.safetensors")
    config = EngineConfig(
        hidden_layers=(3,),
        attention_heads=HEADS,
        max_hidden_rows_per_step=512,
        steering_layers=(1,),
        steering_folder=vectors,
        steering_vectors=("push",),
    )
    # One more than there are adapters: vLLM's CPU build reads the last slot for requests without one.
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    with engines.engine(model, config, block_size=BLOCK_TOKENS, **lora) as llm:
        yield Engine(llm, adapters, merged, push.numpy())


def assert_exact(engine: Engine, request: Request, answer: Answer) -> None:
    pushes = [oracle.Push(1, 0.5, engine.push)] if "steer" in request.spec else []
    fed = [*request.prompt, *answer.token_ids[:-1]]
    (truth,) = oracle.read(engine.merged[request.adapter], [fed], *pushes)
    rows, attention = answer.items["h"], answer.items["a"]
    assert isinstance(rows, RowsReadout)
    assert isinstance(attention, AttentionReadout)
    assert rows.positions == tuple(range(len(fed)))
    errors = np.linalg.norm(rows.values - truth.hidden[2], axis=1)
    assert (errors <= 1e-4 * np.linalg.norm(truth.hidden[2], axis=1)).all()
    last = len(request.prompt) - 1
    weights = np.stack([truth.attention[layer - 1][head][last, : last + 1] for layer, head in HEADS])
    np.testing.assert_allclose(attention.weights, weights, atol=1e-4)


def test_every_request_of_a_batch_is_read_and_steered_on_its_own_adapter(engine: Engine) -> None:
    requests = [
        Request({**READ, **steering}, adapter, tuple(PROMPT[: 40 + 11 * i]))
        for i, (adapter, steering) in enumerate((a, s) for a in (None, "A", "B") for s in ({}, STEER))
    ]
    together = engine.run(*requests)
    for request, answer in zip(requests, together, strict=True):
        assert_exact(engine, request, answer)
        (alone,) = engine.run(request)
        assert answer.token_ids == alone.token_ids
        np.testing.assert_allclose(answer.items["h"].values, alone.items["h"].values, rtol=1e-3, atol=1e-3)
    # The same prompt on other weights is another text: else none of this shows anything.
    same = engine.run(*(Request({**READ}, adapter) for adapter in (None, "A", "B")))
    assert len({answer.token_ids for answer in same}) == 3


def test_cached_blocks_are_shared_by_adapter_and_steering_together(engine: Engine) -> None:
    """The last block is always computed; so a prompt of three blocks shares two."""
    light = {"hidden": {"last": {"layer": 3}}}
    variants = [(adapter, steering) for adapter in (None, "A", "B") for steering in ({}, STEER)]
    engine.forget()
    cold = {}
    for adapter, steering in variants:
        (answer,) = engine.run(Request({**light, **steering}, adapter))
        assert answer.cached_tokens == 0
        cold[adapter, bool(steering)] = answer
    for adapter, steering in variants:
        (answer,) = engine.run(Request({**light, **steering}, adapter))
        first = cold[adapter, bool(steering)]
        assert answer.cached_tokens == len(PROMPT) - BLOCK_TOKENS
        assert answer.token_ids == first.token_ids
        np.testing.assert_allclose(answer.items["last"].values, first.items["last"].values, rtol=1e-4, atol=1e-4)


def test_steering_of_generated_tokens_shares_the_prompt_with_its_own_adapter_alone(engine: Engine) -> None:
    decode = {"steer": [{**STEER["steer"][0], "phase": "decode"}]}
    engine.forget()
    assert engine.run(Request({}, "A"))[0].cached_tokens == 0
    assert engine.run(Request(decode, "A"))[0].cached_tokens == len(PROMPT) - BLOCK_TOKENS
    assert engine.run(Request(decode, "B"))[0].cached_tokens == 0
