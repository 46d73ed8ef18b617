"""What is compared: the engines that are started, and the variants, each a way to ask one of them.

Owns which layers, heads and vectors every variant names. Starts nothing and imports no vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from bench.shapes import Shape
from guard.mia.engine_config import EngineConfig

EngineName = Literal["vanilla", "mia", "hotwire", "hooks", "extract"]

VECTORS = 64
"""Steering vectors in the bank: the largest batch in which every request has its own."""

ATTENTION_HEADS = 16
HIDDEN_LAYERS = 3
ON_CPU: tuple[EngineName, ...] = ("vanilla", "mia", "hooks")
"""Engines that start without a GPU: hotwire's op is a Triton kernel, and vLLM's speculator copies on a CUDA stream."""


@dataclass(frozen=True)
class Taps:
    """Where one model is read and steered. Layers count blocks from 1."""

    hidden_layers: tuple[int, ...]
    attention_heads: tuple[tuple[int, int], ...]
    steering_layer: int

    @property
    def probes(self) -> dict[str, int]:
        """One at each hidden layer."""
        return {f"probe{layer}": layer for layer in self.hidden_layers}

    def engine_config(self, weights: Path) -> EngineConfig:
        """The aperture's taps, with ``weights`` the folder of the steering vectors and probes."""
        return EngineConfig(
            hidden_layers=self.hidden_layers,
            attention_heads=self.attention_heads,
            steering_layers=(self.steering_layer,),
            steering_folder=weights,
            steering_vectors=tuple(vector_name(i) for i in range(VECTORS)),
            probe_folder=weights,
            probes=self.probes,
        )


def taps_of(shape: Shape) -> Taps:
    """Three hidden layers at the quarters, heads spread over four layers, steering in the middle."""
    quarters = tuple(max(1, shape.layers * k // 4) for k in range(1, HIDDEN_LAYERS + 1))
    layers = sorted({max(1, shape.layers * k // 8) for k in (3, 4, 5, 6)})
    per_layer = min(shape.heads, ATTENTION_HEADS // len(layers))
    heads = tuple((layer, head * shape.heads // per_layer) for layer in layers for head in range(per_layer))
    return Taps(tuple(dict.fromkeys(quarters)), heads, max(1, shape.layers // 2))


def vector_name(i: int) -> str:
    return f"v{i % VECTORS:02}"


def write_weights(shape: Shape, folder: Path) -> None:
    """Random vectors of length 1 and random probes, as the aperture reads them. Beside dummy weights' stream such a
    vector is a strong push."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(VECTORS):
        vector = rng.standard_normal(shape.hidden_size).astype(np.float32)
        save_file({"vector": vector / np.linalg.norm(vector)}, folder / f"{vector_name(i)}.safetensors")
    for name in taps_of(shape).probes:
        weight = rng.standard_normal((1, shape.hidden_size)).astype(np.float32)
        save_file({"weight": weight, "bias": np.zeros(1, np.float32)}, folder / f"{name}.safetensors")


Ask = Callable[[Taps, int, int], dict[str, Any] | None]
"""``extra_args`` of the i-th request of a batch with a prompt of that many tokens; None asks for nothing."""


@dataclass(frozen=True)
class Variant:
    """One way to ask one engine. ``steers``: its answers must differ from those of the same engine unasked."""

    name: str
    engine: EngineName
    title: str
    ask: Ask
    steers: bool = False


def _nothing(taps: Taps, i: int, prompt_tokens: int) -> dict[str, Any] | None:
    return None


def _hidden(taps: Taps, positions: tuple[str, ...]) -> dict[str, Any]:
    return {
        "hidden": {
            f"{where}{layer}": {"layer": layer, "positions": where}
            for where in positions
            for layer in taps.hidden_layers
        }
    }


def _probes(taps: Taps, positions: tuple[str, ...]) -> dict[str, Any]:
    asked = {f"{where}{name}": {"probe": name, "positions": where} for where in positions for name in taps.probes}
    return {"probes": asked}


def _attention(taps: Taps, prompt_tokens: int) -> dict[str, Any]:
    """From the last prompt token on two spans: the first half of what is before it, and the second."""
    middle = prompt_tokens // 2
    spans = {"instruction": {"tokens": [[0, middle]]}, "data": {"tokens": [[middle, prompt_tokens - 1]]}}
    heads = [list(head) for head in taps.attention_heads]
    return {"spans": spans, "attention": {"focus": {"heads": heads, "spans": list(spans)}}}


def _steer(taps: Taps, i: int) -> dict[str, Any]:
    return {"steer": [{"vector": vector_name(i), "layer": taps.steering_layer, "coefficient": 1.0, "phase": "both"}]}


def _mia(*parts: Literal["hidden", "state", "probes", "logits", "attention", "steer"]) -> Ask:
    def ask(taps: Taps, i: int, prompt_tokens: int) -> dict[str, Any]:
        spec: dict[str, Any] = {}
        for part in parts:
            match part:
                case "hidden":
                    spec |= _hidden(taps, ("last_prompt", "generated"))
                case "state":
                    spec |= _hidden(taps, ("last_prompt",))
                case "probes":
                    spec |= _probes(taps, ("last_prompt", "generated"))
                case "logits":
                    spec |= _probes(taps, ("last_prompt",))
                case "attention":
                    spec |= _attention(taps, prompt_tokens)
                case "steer":
                    spec |= _steer(taps, i)
        return {"mia": json.dumps(spec)}

    return ask


def _hotwire(taps: Taps, i: int, prompt_tokens: int) -> dict[str, Any]:
    # Its layers count from 0.
    return {"hotwire": json.dumps({"id": vector_name(i), "layer": taps.steering_layer - 1, "scale": 1.0})}


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("vanilla", "vanilla", "vLLM", _nothing),
        Variant("idle", "mia", "taps in place, nothing asked", _nothing),
        Variant("hidden", "mia", "hidden states of 3 layers, last prompt token and all generated", _mia("hidden")),
        Variant("probed", "mia", "probes at 3 layers, last prompt token and all generated", _mia("probes")),
        Variant("attention", "mia", "attention of 16 heads on 2 spans, last prompt token", _mia("attention")),
        Variant("steered", "mia", "each request steered by its own vector", _mia("steer"), steers=True),
        Variant("all", "mia", "hidden, attention and steered at once", _mia("hidden", "attention", "steer"), True),
        Variant("hotwire_idle", "hotwire", "hotwire 0.1.2, nothing asked", _nothing),
        Variant("hotwire_steered", "hotwire", "hotwire 0.1.2, each request its own vector", _hotwire, steers=True),
        Variant("eager_hooks", "hooks", "enforce_eager and forward hooks, 3 layers' rows to the host", _nothing),
        Variant("extract", "extract", "vLLM's extract_hidden_states, 3 layers to files", _nothing),
    )
}

SERVED = {
    variant.name: variant
    for variant in (
        Variant("vanilla", "vanilla", "vLLM's server", _nothing),
        Variant("idle", "mia", "the guard's server, nothing asked", _nothing),
        Variant("state", "mia", "3 layers' states, last prompt token", _mia("state")),
        Variant("attention", "mia", "attention of 16 heads on 2 spans, last prompt token", _mia("attention")),
        Variant("judged", "mia", "probes at 3 layers and attention, last prompt token", _mia("logits", "attention")),
        Variant("guarded", "mia", "3 layers' states and attention, last prompt token", _mia("state", "attention")),
        Variant(
            "guarded_steered",
            "mia",
            "the same, and each request steered by its own vector",
            _mia("state", "attention", "steer"),
        ),
    )
}
"""Over HTTP nobody asks for the states of every generated token: they are megabytes of JSON an answer."""


@dataclass(frozen=True)
class EngineStart:
    """How one engine is started. ``vllm_args`` go to ``vllm.LLM``, ``environment`` on top of the parent's."""

    vllm_args: dict[str, Any]
    environment: dict[str, str]


ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What every engine gets, ours and others'. FlashInfer's sampler wants a compiler at start."""


def engine_start(
    engine: EngineName,
    shape: Shape,
    *,
    device: Literal["cuda", "cpu"],
    kv_tokens: int,
    max_num_batched_tokens: int,
    scratch: Path,
    peers: Path,
) -> EngineStart:
    """Arguments of one engine, alike for all but what makes it this one.

    ``kv_tokens``: room in its KV cache, in bytes fixed beforehand, so that engines side by side do not measure each
    other's memory. ``scratch``: the folder of vectors and of what ``extract`` writes. ``peers``: where hotwire lies.
    """
    taps = taps_of(shape)
    vllm_args: dict[str, Any] = {
        "model": str(shape.folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": kv_tokens * shape.kv_bytes_per_token,
        "enforce_eager": device == "cpu" or engine == "hooks",
        "worker_extension_cls": "bench.worker_extension.BenchExtension",
    }
    if device == "cpu":
        vllm_args |= {"dtype": "float32", "async_scheduling": False}
    environment = {**ENVIRONMENT, "VLLM_PLUGINS": engine if engine in ("mia", "hotwire") else "none"}
    if engine == "hotwire":
        environment |= {
            "PYTHONPATH": str(peers),
            "HOTWIRE_VECTORS": str(scratch / "hotwire"),
            "HOTWIRE_SLOTS": str(VECTORS),
        }
    if engine == "extract":
        # An id is the input of that layer, counted from 0: the output of as many blocks.
        layers = list(taps.hidden_layers)
        vllm_args["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        }
        vllm_args["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(scratch / "extract")},
        }
    return EngineStart(vllm_args, environment)
