"""The converted folder loads in transformers and is the model that went into the GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guard.gguf_model import ConversionError, convert, hugging_face_name, unpermute
from tests.tiny_gguf import HEADS, KV_HEADS, TEMPLATE, TOKENS, permute, write_gguf

torch = pytest.importorskip("torch", reason="needs torch, which comes with vLLM")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random tiny model of transformers, and the folder made from its GGUF file."""
    folder = tmp_path_factory.mktemp("gguf")
    model = write_gguf(folder / "tiny.gguf")
    (folder / "out").mkdir()
    convert(folder / "tiny.gguf", folder / "out")
    return model, folder / "out"


def test_the_converted_model_computes_the_same_logits(converted: tuple[Any, Path]) -> None:
    from transformers import AutoModelForCausalLM

    original, folder = converted
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[3, 5, 8, 1, 4, 9]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-6)


def test_special_tokens_are_single_tokens_and_text_survives_a_round_trip(converted: tuple[Any, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    text = "<|im_start|>a 12<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "a", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"  # noqa: S105 - a token of text


def test_the_chat_template_is_the_one_in_the_file(converted: tuple[Any, Path]) -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(converted[1]).chat_template == TEMPLATE


def test_unpermute_undoes_the_reordering_of_the_rotary_pairs() -> None:
    rows = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    for heads in (HEADS, KV_HEADS):
        np.testing.assert_array_equal(unpermute(permute(rows, heads), heads), rows)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "rope_freqs.weight", "blk.0.attn_q.bias"])
def test_a_tensor_that_the_converter_does_not_know_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConversionError, match=name):
        hugging_face_name(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"pre": "qwen2"}, "qwen2"),
        ({"add_bos": True}, "adds a first token"),
        ({"rope_scaling": "yarn"}, "scaled rotary"),
    ],
)
def test_a_file_that_the_converter_does_not_know_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "odd.gguf", **change)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "odd.gguf", tmp_path)


def test_the_tiny_vocabulary_covers_what_the_tests_say() -> None:
    assert len(set(TOKENS)) == len(TOKENS)
