"""MIA's steering vectors, which are pickled files, as the bank's safetensors: once at start, for the operator alone.

Owns the reading of such a file and the private folder for what it becomes. Nothing is unpickled but tensors and numpy
arrays, and by torch's restricted reader.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save

from guard.mia.compat import CompatError
from guard.mia.steering import TENSOR_NAME
from guard.paths import cache_folder

DIRECTION, TARGET = "dir", "avg_proj"
"""Keys of MIA's vector files: the direction, ``[hidden_size]``, and where ``adjust_rs`` brings the projection on it."""

UNIT_TOLERANCE = 1e-3
"""How far from 1 a direction's length may be for ``avg_proj`` to mean a projection on it."""


def convert_vector(path: Path) -> tuple[str, Path, float | None]:
    """Write one vector to where the bank reads it. Returns its name, that folder, and ``avg_proj`` if it has a meaning.

    The folder is named by what is in it and belongs to the user alone, so that every process of every start finds the
    same one and vLLM's compile cache still fits. Raises ``CompatError`` that names the file and the remedy.
    """
    contents = _read(path)
    direction = _tensor(path, contents.get(DIRECTION, contents.get(TENSOR_NAME)))
    target = contents.get(TARGET)
    has_unit_length = abs(float(direction.norm()) - 1.0) <= UNIT_TOLERANCE
    avg_proj = _number(path, target) if target is not None and has_unit_length else None
    name = re.sub(r"[^A-Za-z0-9_.\-]", "_", path.stem)[:64]
    data = save({TENSOR_NAME: direction})
    folder = cache_folder() / "steering" / hashlib.sha256(data).hexdigest()[:32]
    _write(folder, f"{name}.safetensors", data)
    return name, folder, avg_proj


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with torch.serialization.safe_globals(_numpy_globals()):
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CompatError(
            f"steering vector {path} is a pickle of more than tensors and numpy arrays, which is not read. Where you "
            f"trust it, write it anew: torch.save({{'{DIRECTION}': torch.as_tensor(v), '{TARGET}': float(p)}}, FILE)"
        ) from None
    except Exception as error:  # whatever a reader raises on a file that is not what its name says
        raise CompatError(f"steering vector {path}: {error}") from error
    if not isinstance(contents, dict):
        raise CompatError(f"steering vector {path} holds a {type(contents).__name__}, not a dict with {DIRECTION!r}")
    return contents


def _numpy_globals() -> list[Any]:
    """What the pickle of a numpy array of numbers names, under numpy's old and new module names."""
    rebuild = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    scalar = np._core.multiarray.scalar  # type: ignore[attr-defined]
    renamed = [
        (function, f"{module}.{name}")
        for function, name in ((rebuild, "_reconstruct"), (scalar, "scalar"))
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    ]
    kinds = [type(np.dtype(kind)) for kind in (np.float16, np.float32, np.float64, np.int64)]
    return [*renamed, np.ndarray, np.dtype, *kinds]


def _number(path: Path, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) <= 1e6:
        raise CompatError(f"steering vector {path}: {TARGET!r} is not a number")
    return number


def _tensor(path: Path, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise CompatError(f"steering vector {path} has no tensor {DIRECTION!r}")
    tensor = torch.as_tensor(value).detach().to(torch.float32).reshape(-1).contiguous()
    if not tensor.numel() or not torch.isfinite(tensor).all() or not tensor.any():
        raise CompatError(f"steering vector {path} is empty, zero, or has values that are not finite")
    return tensor


def _write(folder: Path, name: str, data: bytes) -> None:
    """Whole or not at all: other processes write the same bytes at the same time."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    unfinished = folder / f".{name}.{os.getpid()}"
    unfinished.write_bytes(data)
    unfinished.chmod(0o600)
    unfinished.replace(folder / name)
