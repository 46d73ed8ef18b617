"""Tiny random models on disk, a few layers each, that both vLLM and transformers load: the oracle's subjects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}

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
    "phi3": {**SMALL, "pad_token_id": 0},
    "granite": {
        **SMALL,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "gpt2": {"n_embd": 128, "n_head": 4},
    "opt": {"hidden_size": 128, "num_attention_heads": 4, "ffn_dim": 192, "word_embed_proj_dim": 128},
    "olmo2": SMALL,
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **SMALL,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
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


def save_tiny_model(architecture: str, folder: Path, layers: int = 3, seed: int = 0) -> Path:
    """Write a random float32 model of ``architecture`` with tokenizer into ``folder``; returns it."""
    torch.manual_seed(seed)
    common = {
        "num_hidden_layers": layers,
        "vocab_size": 272,
        "max_position_embeddings": 2048,
        "eos_token_id": 257,
        "bos_token_id": None,
        "pad_token_id": 258,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    config = AutoConfig.for_model(architecture, **common | ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Random attention is nearly uniform; wider weights give patterns that a wrong mask or scale would change.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
