"""Turns a GGUF file of the Llama family into a float32 Hugging Face model folder.

Owns the inverse of llama.cpp's conversion: tensor names, the rotary reordering of the query and key rows, and the
tokenizer that is stored in the metadata. Everything comes from the file; nothing is guessed, and whatever this module
does not know is refused. Never touches the network, torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_NAMES = {
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
SPECIAL_TOKEN_TYPE = 3
"""GGUF's token type "control"."""


class ConversionError(ValueError):
    """The file is not a model that this module knows how to convert."""


def convert(gguf_file: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write config, weights, tokenizer and chat template of ``gguf_file`` into the existing ``folder``."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if (architecture := meta.get("general.architecture")) != "llama":
        raise ConversionError(f"{gguf_file.name}: architecture {architecture!r}; only 'llama' is converted")
    tensors = {}
    for done, (name, values) in enumerate(_tensors(reader, meta), start=1):
        tensors[name] = np.ascontiguousarray(values, dtype=np.float32)
        if progress:
            progress(done, len(reader.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(meta, folder / "tokenizer.json")
    _write_json(folder / "config.json", _config(meta, tied="lm_head.weight" not in tensors))
    _write_json(folder / "generation_config.json", _special_ids(meta))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(meta))


def unpermute(rows: FloatArray, heads: int) -> FloatArray:
    """Undo llama.cpp's reordering of rotary pairs: it stores (0, d/2, 1, d/2+1, ...) of each head's d rows."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in BLOCK_NAMES:
            return f"model.layers.{layer}.{BLOCK_NAMES[part]}.weight"
        case [part, "weight"] if part in OUTER_NAMES:
            return f"{OUTER_NAMES[part]}.weight"
    raise ConversionError(f"unknown tensor {name!r}")


def _tensors(reader: Any, meta: dict[str, Any]) -> Iterator[tuple[str, FloatArray]]:
    from gguf import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        yield hugging_face_name(tensor.name), unpermute(values, heads[part]) if part in heads else values


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    if any(name.startswith("llama.rope.scaling") for name in meta):
        raise ConversionError("a scaled rotary embedding is not converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(meta["llama.rope.freq_base"]),
        "vocab_size": meta["llama.vocab_size"],
        "tie_word_embeddings": tied,
        **_special_ids(meta),
    }


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: meta[f"tokenizer.ggml.{name}_token_id"] for key, name in ids.items()}


def _write_tokenizer(meta: dict[str, Any], file: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind := (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
        raise ConversionError(f"tokenizer {kind} is not converted; only ('gpt2', 'smollm') is")
    if meta.get("tokenizer.ggml.add_bos_token", True):
        raise ConversionError("a tokenizer that adds a first token is not converted")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # "smollm" is llama.cpp's name for: every digit alone, then GPT-2's pattern on bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(file))


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        **{key: tokens[meta[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()},
    }


def _shortest(value: float) -> float:
    """A float32 as the decimal that a person wrote: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
