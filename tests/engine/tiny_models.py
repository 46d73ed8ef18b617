"""Tiny random models on disk, a few layers each, that both vLLM and transformers load: the oracle's subjects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}

GEMMA4 = {
    **SMALL,
    "head_dim": 32,
    "global_head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 272,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": {**SMALL, "head_dim": 64},  # head size is not hidden size / heads; queries and keys are normed
    "mistral": {**SMALL, "head_dim": 32, "sliding_window": 24},
    "gemma2": {
        **SMALL,
        "head_dim": 32,
        "query_pre_attn_scalar": 48,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {**SMALL, "head_dim": 32, "query_pre_attn_scalar": 48, "sliding_window": 24},
    "gemma4_text": GEMMA4,  # its blocks are listed twice; layers of both kinds have their own keys
    "phi3": {**SMALL, "pad_token_id": 0},
    "granite": {
        **SMALL,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "stablelm": SMALL,  # its block returns a residual that nobody adds
    "gpt2": {"n_embd": 128, "n_head": 4},
    "opt": {"hidden_size": 128, "num_attention_heads": 4, "ffn_dim": 192, "word_embed_proj_dim": 128},
    "olmo2": SMALL,
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

MORE_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cohere": SMALL,  # attention and MLP side by side; the block adds all by itself
    "exaone4": {**SMALL, "sliding_window": 24, "sliding_window_pattern": 2},  # norms behind what they norm
    "falcon": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "multi_query": True,
        "alibi": False,
        "new_decoder_architecture": False,
    },
    "glm4": {**SMALL, "head_dim": 32},  # norms before and behind; rotary embedding of half a head
    "gpt_neox": {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192},
    "vaultgemma": {  # transformers backend; a scale of its own
        **SMALL,
        "head_dim": 32,
        "query_pre_attn_scalar": 48,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
    },
    "qwen3_moe": {
        **SMALL,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "afmoe": {**SMALL, **EXPERTS, "head_dim": 32, "moe_intermediate_size": 64, "sliding_window": 24},
    "arcee": SMALL,
    "bitnet": SMALL,
    "doge": SMALL,
    "dots1": {**SMALL, **ROUTED, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "ernie4_5": SMALL,
    "ernie4_5_moe": {
        **SMALL,
        "moe_intermediate_size": 64,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "gemma": {**SMALL, "head_dim": 32},
    "glm": {**SMALL, "head_dim": 32},
    "glm4_moe": {**SMALL, **ROUTED, "head_dim": 32, "first_k_dense_replace": 1},
    "gpt_bigcode": {"n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 2048},
    "gptj": {"n_embd": 128, "n_head": 4, "n_layer": 3, "rotary_dim": 16, "n_positions": 2048},
    "granitemoe": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {  # attention layers alone
        **SMALL,
        "num_local_experts": 0,
        "shared_intermediate_size": 192,
        "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope",
    },
    "helium": {**SMALL, "head_dim": 32},
    "hunyuan_v1_dense": {**SMALL, "head_dim": 32},
    "hyperclovax": {**SMALL, "head_dim": 32},
    "jais2": {**SMALL, "head_dim": 32},
    "ministral": {**SMALL, "head_dim": 32, "sliding_window": 24},
    "nemotron": {**SMALL, "head_dim": 32},
    "olmo": SMALL,
    "olmo3": {**SMALL, "sliding_window": 24},
    "olmoe": {**SMALL, **EXPERTS},
    "persimmon": {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192},
    "qwen2_moe": {**SMALL, **EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "seed_oss": {**SMALL, "head_dim": 32},
    "smollm3": SMALL,
    "starcoder2": {**SMALL, "sliding_window": None},
}
"""Of structures that others above have already, or of few users: tested when asked for."""

LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
}
STATE_SPACE = {"hidden_size": 128, "state_size": 16}
ALTERNATING = ["linear_attention", "full_attention", "linear_attention"]

REFUSED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**SMALL, **LATENT, "num_key_value_heads": 4},
    "deepseek_v3": {**SMALL, **LATENT, "num_key_value_heads": 4},
    "mamba": STATE_SPACE,
    "mamba2": {**STATE_SPACE, "num_heads": 8, "head_dim": 32, "n_groups": 1},
    "jamba": {**SMALL, "mamba_d_state": 16, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {**SMALL, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16},
    "qwen3_next": {
        **SMALL,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "layer_types": ALTERNATING,
    },
    "gemma3n_text": {
        **SMALL,
        "head_dim": 32,
        "intermediate_size": [192, 192, 192],
        "activation_sparsity_pattern": [0.0, 0.0, 0.0],
        "laurel_rank": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 272,
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": True,
    },
    "gemma4_shared": {**GEMMA4, "model_type": "gemma4_text", "num_kv_shared_layers": 1},
    "llama4_text": {
        **SMALL,
        "head_dim": 32,
        "num_local_experts": 2,
        "intermediate_size_mlp": 192,
        "attention_chunk_size": 128,
        "interleave_moe_layer_step": 1,
    },
    "bloom": {"hidden_size": 128, "n_head": 4, "n_layer": 3, "tie_word_embeddings": True},
    "gpt_oss": {**SMALL, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte and three specials: offsets and ids that can be worked out by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>", "<|pad|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")  # noqa: S106
    fast.chat_template = CHAT_TEMPLATE
    return fast


COMMON = {
    "vocab_size": 272,
    "max_position_embeddings": 2048,
    "eos_token_id": 257,
    "bos_token_id": None,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def widen(model: PreTrainedModel) -> None:
    """Random attention is nearly uniform; wider weights give patterns that a wrong mask or scale would change."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(4.0)


def save_tiny_model(architecture: str, folder: Path, layers: int = 3, seed: int = 0) -> Path:
    """Write a random float32 model of ``architecture`` with tokenizer into ``folder``; returns it."""
    torch.manual_seed(seed)
    fields = {**COMMON, "num_hidden_layers": layers} | (ARCHITECTURES | MORE_ARCHITECTURES | REFUSED)[architecture]
    config = AutoConfig.for_model(fields.pop("model_type", architecture), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    widen(model)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
