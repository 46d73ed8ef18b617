"""Writes a tiny random Llama model as a GGUF file, as llama.cpp's converter does. Used by tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEADS, KV_HEADS, HIDDEN, LAYERS, MLP = 4, 2, 16, 2, 24
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, "a", "b", "Ġ", "1", "2", "ab", "Ġa"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def permute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp's order of the rows of query and key projections."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    file: Path, *, architecture: str = "llama", pre: str = "smollm", add_bos: bool = False, rope_scaling: str = ""
) -> Any:
    """Write the file; return the transformers model that is in it."""
    import torch
    from gguf import GGUFWriter
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    if rope_scaling:
        writer.add_string("llama.rope.scaling.type", rope_scaling)
    _add_tokenizer(writer, pre, add_bos)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, source in _OUTER.items():
        writer.add_tensor(f"{name}.weight", weights[f"{source}.weight"])
    for layer in range(LAYERS):
        for name, source in _BLOCK.items():
            values = weights[f"model.layers.{layer}.{source}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            writer.add_tensor(f"blk.{layer}.{name}.weight", permute(values, heads) if heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: Any, pre: str, add_bos: bool) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
