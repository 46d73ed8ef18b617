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

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192},
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
    config = AutoConfig.for_model(
        architecture,
        num_hidden_layers=layers,
        vocab_size=272,
        max_position_embeddings=2048,
        eos_token_id=257,
        bos_token_id=None,
        pad_token_id=258,
        tie_word_embeddings=False,
        dtype="float32",
        **ARCHITECTURES[architecture],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Random attention is nearly uniform; wider weights give patterns that a wrong mask or scale would change.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
