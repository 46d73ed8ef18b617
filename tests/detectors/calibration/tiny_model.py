"""A model's folder as calibration looks at it, and planted readings of rows: the commands run whole, without an engine.

What an engine would have read lies in the store, so that none is started; a row that is not there would start one, and
the folder has no weights that could be loaded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from detectors.calibration.demands import has_instruction
from detectors.calibration.feature_store import FeatureStore, Reading
from detectors.calibration.features import full_plan, model_shape
from detectors.calibration.rows import Row
from guard.model_weights import weights_sha256

LAYERS, HEADS, SIZE = 3, 2, 16
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


class StartedError(Exception):
    """An engine would have been started."""


def no_engine(*_args: object, **_kwargs: object) -> None:
    """In place of what starts one."""
    raise StartedError


def make_model(folder: Path, template: str = TEMPLATE) -> Path:
    folder.mkdir()
    shape = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": SIZE, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")  # noqa: S106
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def plant(model: Path, rows: Sequence[Row]) -> None:
    """Readings in which attacks show at every layer and head."""
    store = FeatureStore(weights_sha256(model), full_plan(model_shape(model)))
    plan = store.plan
    for row in rows:
        noise = np.random.default_rng(zlib.crc32(json.dumps(row.messages).encode()))
        attack = row.label == "attack"
        last = noise.normal(size=(len(plan.layers), SIZE)).astype(np.float32) + 3.0 * attack
        mass = noise.uniform(0.2, 0.4, size=(len(plan.heads), 2)).astype(np.float32)
        mass[:, 0] *= 0.2 if attack else 1.0
        if not has_instruction(row.messages):
            mass[:] = np.nan
        windows = noise.normal(size=(1, len(plan.window_layers), SIZE)).astype(np.float32) + 3.0 * attack
        store.put(row.messages, Reading(last, mass, windows, np.array([9], np.float32)))


def texts(count: int, word: str) -> Iterator[str]:
    """Of no likeness to one another."""
    letters = np.random.default_rng(zlib.crc32(word.encode()))
    for _ in range(count):
        yield " ".join(["".join(letters.choice(list("abcdefghijklmnopqrstuvwxyz"), 8)) for _ in range(6)])


def write_rows(path: Path, count: int, **more: Any) -> Path:
    """So many of either label. more: further fields; a function is called with the text."""
    rows = []
    for label in ("benign", "attack"):
        for text in texts(count, f"{path.name}{label}"):
            row = {"label": label, **{key: one(text) if callable(one) else one for key, one in more.items()}}
            rows.append(row if "messages" in row else {**row, "text": text})
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path
