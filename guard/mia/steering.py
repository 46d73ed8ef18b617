"""The operator's steering vectors: loaded once at start, by name, from safetensors.

Owns the bank's contents. A request names a vector, never a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

TENSOR_NAME = "vector"


class SteeringFolderError(ValueError):
    """A steering folder that cannot be used; the message names the file and the remedy."""


def vector_names(folder: Path) -> tuple[str, ...]:
    """Names of the vectors in ``folder``, sorted. Raises ``SteeringFolderError`` when it is no folder."""
    if not folder.is_dir():
        raise SteeringFolderError(f"steering folder {folder} does not exist")
    return tuple(sorted(path.stem for path in folder.glob("*.safetensors")))


@dataclass(frozen=True)
class Bank:
    """Vectors by slot. vectors: ``[len(names), hidden_size]`` float32."""

    names: tuple[str, ...]
    vectors: torch.Tensor

    def slot(self, name: str) -> int:
        return self.names.index(name)


def load_bank(folder: Path | None, names: tuple[str, ...], hidden_size: int, device: torch.device) -> Bank:
    """Load ``names`` in their order. Raises ``SteeringFolderError``."""
    if folder is None or not names:
        return Bank((), torch.zeros(0, hidden_size, device=device))
    return Bank(names, torch.stack([_load_vector(folder / f"{n}.safetensors", hidden_size) for n in names]).to(device))


def _load_vector(path: Path, hidden_size: int) -> torch.Tensor:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SteeringFolderError(f"steering vector {path}: {error}") from error
    vector = tensors.get(TENSOR_NAME)
    if vector is None or vector.shape != (hidden_size,):
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise SteeringFolderError(
            f"steering vector {path} must hold one tensor {TENSOR_NAME!r} of [{hidden_size}], not {shapes}"
        )
    if not torch.isfinite(vector).all() or not vector.any():
        raise SteeringFolderError(f"steering vector {path} is zero or has values that are not finite")
    return vector.float()
