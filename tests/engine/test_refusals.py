"""What cannot be read exactly is refused at start, by a real engine, and the error says why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from guard.mia.engine_config import EngineConfig
from guard.mia.results import RowsReadout
from guard.mia.spec import MiaSpec
from guard.mia.taps import UnsupportedModelError
from tests.engine import oracle
from tests.engine.engines import engine

LAYERS = (0, 1, 2, 3)
STREAMS = EngineConfig(hidden_layers=LAYERS, max_hidden_rows_per_step=128)
ATTENTION = EngineConfig(attention_heads=((1, 0), (2, 0), (3, 0)))


def refusal(folder: Path, config: EngineConfig, **vllm_args: Any) -> str:
    """Why an engine on the model in ``folder`` does not start."""
    with pytest.raises(UnsupportedModelError) as refused, engine(folder, config, **vllm_args):
        pass
    return str(refused.value)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("deepseek_v2", r"DeepseekV2ForCausalLM: multi-head latent attention \(MLA\)"),
        ("deepseek_v3", r"DeepseekV3ForCausalLM: multi-head latent attention \(MLA\)"),
        ("mamba", "MambaForCausalLM: MambaMixer is linear attention or a state-space layer"),
        ("mamba2", "Mamba2ForCausalLM: MambaMixer2 is linear attention or a state-space layer"),
        ("jamba", "JambaForCausalLM: MambaMixer is linear attention or a state-space layer"),
        # Each of its blocks has one ordinary attention as well, beside the state-space layer.
        ("falcon_h1", "FalconH1ForCausalLM: MambaMixer2 is linear attention or a state-space layer"),
        ("qwen3_next", "Qwen3NextForCausalLM: .* is linear attention or a state-space layer"),
    ],
)
def test_layers_that_keep_no_keys_of_each_head_are_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    # vLLM's CPU build has some of these layers in bfloat16 alone.
    text = refusal(oracle.save(architecture, tmp_path), STREAMS, dtype="bfloat16")
    assert re.match(reason, text), text


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    text = refusal(oracle.save("whisper", tmp_path), STREAMS, max_model_len=64)
    assert text.startswith("WhisperForConditionalGeneration: an encoder-decoder's cross attention")


def test_blocks_that_carry_several_streams_are_refused(tmp_path: Path) -> None:
    text = refusal(oracle.save("gemma3n_text", tmp_path), STREAMS)
    assert text.startswith("Gemma3nForCausalLM: its blocks carry several streams")


@pytest.mark.parametrize(("architecture", "reason"), [("bloom", "ALiBi"), ("gpt_oss", "attention sinks")])
def test_attention_that_readouts_cannot_recompute_is_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    assert reason in refusal(oracle.save(architecture, tmp_path), ATTENTION)


def test_a_stream_is_exact_where_the_attention_is_not_known(tmp_path: Path) -> None:
    folder = oracle.save("llama4_text", tmp_path)
    assert "ChunkedLocalAttention" in refusal(folder, ATTENTION)
    spec = MiaSpec.model_validate({"hidden": {f"h{n}": {"layer": n, "positions": "all"} for n in LAYERS}})
    # Longer than a chunk of its attention, 128 tokens.
    conversation = [{"role": "user", "content": "hello there " * 14}]
    with engine(folder, STREAMS) as llm:
        (answer,) = llm.chat([conversation], spec, max_tokens=4, ignore_eos=True)
    (truth,) = oracle.read(folder, [[*answer.prompt_token_ids, *answer.token_ids[:-1]]])
    for layer in LAYERS:
        got, expected = answer.items[f"h{layer}"], truth.stream(layer)
        assert isinstance(got, RowsReadout)
        errors = np.linalg.norm(got.values - expected, axis=1)
        assert (errors <= 1e-4 * np.linalg.norm(expected, axis=1)).all()


def test_attention_over_the_keys_of_another_layer_is_refused(tmp_path: Path) -> None:
    folder = oracle.save("gemma4_shared", tmp_path)
    weights = load_file(folder / "model.safetensors")
    # transformers does not write it, as nothing uses it; vLLM asks for it, and published models have it.
    weights["model.layers.2.self_attn.k_norm.weight"] = torch.ones(32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "uses the keys of another layer" in refusal(folder, ATTENTION)


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
        {"method": "draft_model", "num_speculative_tokens": 2},
    ],
    ids=lambda speculation: speculation["method"],
)
def test_speculative_decoding_is_refused(speculation: dict[str, Any], tmp_path: Path) -> None:
    folder = oracle.save("llama", tmp_path)
    if speculation["method"] == "draft_model":
        speculation = {**speculation, "model": str(folder)}
    assert "speculative decoding" in refusal(folder, STREAMS, speculative_config=speculation)
