"""Writes detectors' files as a calibration would, with given numbers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from detectors.registry import build_detector


def write(folder: Path, kind: str, tensors: dict[str, np.ndarray] | None = None, **params: Any) -> Path:
    """``tiny.json`` with ``params``, and ``tiny.safetensors`` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is not None:
        raw = save(tensors)
        (folder / "tiny.safetensors").write_bytes(raw)
        params = {"weights": "tiny.safetensors", "weights_sha256": hashlib.sha256(raw).hexdigest(), **params}
    path = folder / "tiny.json"
    path.write_text(json.dumps({"model_info": {"name": "tiny"}, "params": params}))
    return path


def build(folder: Path, kind: str, tensors: dict[str, np.ndarray] | None = None, **params: Any) -> Any:
    """The detector from such files."""
    return build_detector(kind, write(folder, kind, tensors, **params))
