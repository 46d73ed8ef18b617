"""The operator's steering vectors: loaded by name from safetensors, at start or while the engine runs.

Owns the bank's contents. A request names a vector, never a file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from guard.mia.spec import NAME

TENSOR_NAME = "vector"


class SteeringFolderError(ValueError):
    """A steering folder that cannot be used; the message names the file and the remedy."""


def vector_names(folder: Path) -> tuple[str, ...]:
    """Names of the vectors in ``folder``, sorted. Raises ``SteeringFolderError`` when it is no folder."""
    if not folder.is_dir():
        raise SteeringFolderError(f"steering folder {folder} does not exist")
    return tuple(sorted(path.stem for path in folder.glob("*.safetensors")))


class FullBankError(RuntimeError):
    """No room for one more vector."""


@dataclass
class Bank:
    """Vectors by slot, at an address that never changes. vectors: ``[capacity, hidden_size]`` float32.

    ``digests``: SHA-256 of each vector's bytes, so that caches can tell vectors of the same name apart.
    """

    folder: Path | None
    vectors: torch.Tensor
    slots: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def allocate(cls, folder: Path | None, capacity: int, hidden_size: int, device: torch.device) -> Bank:
        return cls(folder, torch.zeros(capacity, hidden_size, device=device))

    def slot(self, name: str) -> int:
        return self.slots[name]

    def load(self, name: str) -> None:
        """Read ``NAME.safetensors`` from the folder; a vector of that name is replaced.

        Raises ``SteeringFolderError``, and ``FullBankError`` when there is no free slot.
        """
        if self.folder is None:
            raise SteeringFolderError("there is no steering folder")
        if not NAME.fullmatch(name):
            raise SteeringFolderError(f"{name!r} is no name of a vector: letters, digits, '_', '-' and '.', up to 64")
        vector = _load_vector(self.folder / f"{name}.safetensors", self.vectors.shape[1])
        if name not in self.slots:
            free = sorted(set(range(len(self.vectors))) - set(self.slots.values()))
            if not free:
                raise FullBankError(f"the bank is full: it has room for {len(self.vectors)} vectors")
            self.slots[name] = free[0]
        self.vectors[self.slots[name]].copy_(vector)
        self.digests[name] = hashlib.sha256(vector.numpy().tobytes()).hexdigest()

    def evict(self, name: str) -> None:
        """Forget a vector. Raises ``KeyError`` when there is none of that name."""
        del self.slots[name], self.digests[name]


def load_bank(
    folder: Path | None, names: tuple[str, ...], hidden_size: int, device: torch.device, capacity: int | None = None
) -> Bank:
    """A bank with ``names`` in it, in their order, and room for ``capacity``. Raises ``SteeringFolderError``."""
    bank = Bank.allocate(folder, len(names) if capacity is None else capacity, hidden_size, device)
    for name in names:
        bank.load(name)
    return bank


def _load_vector(path: Path, hidden_size: int) -> torch.Tensor:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SteeringFolderError(f"steering vector {path}: {error}") from error
    vector = tensors.get(TENSOR_NAME)
    if vector is None or vector.shape != (hidden_size,) or not vector.is_floating_point():
        shapes = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
        raise SteeringFolderError(
            f"steering vector {path} must hold one tensor {TENSOR_NAME!r} of [{hidden_size}] floats, not {shapes}"
        )
    vector = vector.float()
    length = float(vector.norm())
    # Methods divide by the length: it must be a number, and so must its square.
    if not (torch.isfinite(vector).all() and 0.0 < length < float("inf")):
        raise SteeringFolderError(f"steering vector {path} is zero, not finite, or too long or short for float32")
    return vector
