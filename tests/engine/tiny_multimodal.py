"""Tiny random models that read more than text: one for images, one for sound, with the processors that they need."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    Idefics3Processor,
    WhisperFeatureExtractor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tests.engine.tiny_models import COMMON, SMALL, byte_tokenizer, widen

TILE_SIZE, PATCH_SIZE, SCALE = 28, 7, 2
TILE_TOKENS = (TILE_SIZE // PATCH_SIZE // SCALE) ** 2
IMAGE_TOKENS = 5 * TILE_TOKENS
"""Of a picture of two by two tiles: these, and the whole once more, smaller."""

SPECIAL = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]


def save_tiny_vision_model(folder: Path) -> Path:
    """A random float32 Idefics3: a llama of three layers behind a small SigLIP. Returns ``folder``."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL})
    config = AutoConfig.for_model(
        "idefics3",
        text_config={"model_type": "llama", **COMMON, **SMALL, "num_hidden_layers": 3},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE_SIZE,
            "patch_size": PATCH_SIZE,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
        pad_token_id=COMMON["pad_token_id"],
        dtype="float32",
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    widen(model)
    model.save_pretrained(folder)
    sizes = {"size": {"longest_edge": 2 * TILE_SIZE}, "max_image_size": {"longest_edge": TILE_SIZE}}
    images = Idefics3ImageProcessorPil(**sizes)
    Idefics3Processor(images, tokenizer, image_seq_len=TILE_TOKENS).save_pretrained(folder)
    return folder


def save_tiny_speech_model(folder: Path) -> Path:
    """A random float32 Whisper, an encoder-decoder. Returns ``folder``."""
    config = AutoConfig.for_model(
        "whisper",
        **COMMON,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=64,
        decoder_start_token_id=COMMON["eos_token_id"],
    )
    model = AutoModelForSpeechSeq2Seq.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=COMMON["eos_token_id"])
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    return folder


def image_url() -> str:
    """A small picture, as chat messages carry it."""
    data = io.BytesIO()
    Image.new("RGB", (2 * TILE_SIZE, 2 * TILE_SIZE), (200, 30, 60)).save(data, "png")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
