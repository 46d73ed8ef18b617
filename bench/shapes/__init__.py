"""What the harness knows of a model: the facts of its ``config.json``. Never its weights; those are dummies.

Three shapes lie here: ``llama8b`` and ``qwen1p5b``, which are measured, and ``tiny``, for rehearsals on a CPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BYTES_PER_VALUE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Shape:
    """One model. ``folder`` holds its ``config.json`` and no weights."""

    name: str
    folder: Path
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden_size: int
    vocabulary: int
    dtype: str

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES_PER_VALUE[self.dtype]


def load_shape(name_or_folder: str) -> Shape:
    """One of the shapes here by name, or the model in a folder. Raises ``FileNotFoundError``."""
    folder = HERE / name_or_folder
    if not (folder / "config.json").is_file():
        folder = Path(name_or_folder).resolve()
    config = json.loads((folder / "config.json").read_text())
    heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        name=folder.name,
        folder=folder,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_size=config.get("head_dim") or hidden_size // heads,
        hidden_size=hidden_size,
        vocabulary=config["vocab_size"],
        dtype=config.get("dtype") or config["torch_dtype"],
    )
