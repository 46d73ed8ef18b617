"""What transformers computes in float32, from a process of its own: vLLM patches transformers' classes in this one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.tiny_models import save_tiny_model
from tests.engine.tiny_multimodal import save_tiny_speech_model, save_tiny_vision_model

MULTIMODAL = {"idefics3": save_tiny_vision_model, "whisper": save_tiny_speech_model}


@dataclass
class Reading:
    """One prompt, by layer - 1. hidden: ``[tokens, hidden_size]`` after the block; attention: ``[heads, T, T]``.

    embedding: ``[tokens, hidden_size]`` on the way into the first block, transformers' ``hidden_states[0]``.
    """

    embedding: np.ndarray
    hidden: list[np.ndarray]
    attention: list[np.ndarray]

    def stream(self, layer: int) -> np.ndarray:
        return self.embedding if layer == 0 else self.hidden[layer - 1]


@dataclass(frozen=True)
class Push:
    """What one steering does after block ``layer``, at every token or at the prompt's ``positions``."""

    layer: int
    coefficient: float
    vector: np.ndarray
    method: str = "add_vector"
    target: float = 0.0
    preserve_norm: bool = False
    positions: tuple[int, ...] | None = None

    def __call__(self, stream: Any) -> Any:
        """stream: ``[1, tokens, hidden_size]``."""
        import torch

        vector = torch.from_numpy(self.vector)
        unit = vector / vector.norm()
        on_unit = (stream @ unit)[..., None] * unit
        after = {
            "add_vector": stream + self.coefficient * vector,
            "project": stream + self.coefficient * (self.target * unit - on_unit),
            "ablate": stream - self.coefficient * on_unit,
            "replace": (self.coefficient * vector).expand_as(stream),
        }[self.method]
        if self.preserve_norm:
            after = after * stream.norm(dim=-1, keepdim=True) / after.norm(dim=-1, keepdim=True)
        if self.positions is None:
            return after
        chosen = torch.zeros(stream.shape[1], dtype=torch.bool)
        chosen[list(self.positions)] = True
        return torch.where(chosen[:, None], after, stream)


@cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def save(architecture: str, folder: Path) -> Path:
    """Write a tiny random model of ``architecture`` into ``folder``; returns it."""
    if (multimodal := MULTIMODAL.get(architecture)) is not None:
        return _pool().submit(multimodal, folder).result()
    return _pool().submit(save_tiny_model, architecture, folder).result()


def read(folder: Path, prompts: Sequence[Sequence[int]], *pushes: Push) -> list[Reading]:
    return _pool().submit(_read, folder, [list(ids) for ids in prompts], pushes).result()


def _read(folder: Path, prompts: list[list[int]], pushes: tuple[Push, ...]) -> list[Reading]:
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForCausalLM
    if hasattr(AutoConfig.from_pretrained(folder), "vision_config"):
        auto = AutoModelForImageTextToText
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    layers = model.config.get_text_config().num_hidden_layers
    (blocks,) = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers)
    hidden: dict[int, Any] = {}

    def hook(layer: int) -> Any:
        def run(_module: Any, _inputs: Any, output: Any) -> Any:
            stream = output[0] if isinstance(output, tuple) else output
            for push in pushes:
                if push.layer == layer:
                    stream = push(stream)
            hidden[layer] = stream[0].numpy().copy()
            return (stream, *output[1:]) if isinstance(output, tuple) else stream

        return run

    for layer, block in enumerate(blocks, start=1):
        block.register_forward_hook(hook(layer))
    readings = []
    with torch.no_grad():
        for ids in prompts:
            output = model(torch.tensor([ids]), output_attentions=True, output_hidden_states=True, use_cache=False)
            attention = [layer[0].numpy().copy() for layer in output.attentions]
            embedding = output.hidden_states[0][0].numpy().copy()
            readings.append(Reading(embedding, [hidden[layer] for layer in range(1, layers + 1)], attention))
    return readings


def logprobs(folder: Path, prompts: Sequence[Sequence[int]], *pushes: Push) -> list[np.ndarray]:
    """Of each prompt ``[tokens - 1]``: the log-probability of every token but the first, given those before it."""
    return _pool().submit(_logprobs, folder, [list(ids) for ids in prompts], pushes).result()


def _logprobs(folder: Path, prompts: list[list[int]], pushes: tuple[Push, ...]) -> list[np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def hook(push: Push) -> Any:
        def run(_module: Any, _inputs: Any, output: Any) -> Any:
            return (push(output[0]), *output[1:]) if isinstance(output, tuple) else push(output)

        return run

    for push in pushes:
        model.model.layers[push.layer - 1].register_forward_hook(hook(push))
    found = []
    with torch.no_grad():
        for ids in prompts:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
            chosen = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
            found.append(chosen.numpy().copy())
    return found
