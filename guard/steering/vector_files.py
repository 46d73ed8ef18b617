"""Files of steering vectors: one tensor ``vector`` for the engine, and in the metadata where it came from.

Owns that record, and the names ``NAME-LAYER`` that vectors learnt at several layers have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from guard.mia.results import FloatArray
from guard.mia.spec import NAME
from guard.writable import NotWritableError, write_result

TENSOR_NAME = "vector"
"""As ``guard.mia.steering`` wants it, which would load torch here."""
RECORD = "calibration"
"""The one entry of metadata, because the format keeps several in no fixed order."""


@dataclass(frozen=True)
class VectorFile:
    """``record``: what its maker wrote about it; empty where that is nothing. ``broken``: why it cannot be read."""

    name: str
    norm: float
    record: Mapping[str, Any]
    broken: str = ""

    @property
    def layer(self) -> int | None:
        """At which it was learnt, or which a calibration chose."""
        layer = self.record.get("layer", (self.record.get("chosen") or {}).get("layer"))
        return layer if isinstance(layer, int) else None


class VectorNameError(ValueError):
    """A name that no vector can have, or that this model has no vector of."""


def checked_name(name: str, layers: Iterable[int]) -> str:
    """``name``, if the names that it gives at ``layers`` are names of vectors. Raises ``VectorNameError``."""
    if not all(NAME.fullmatch(name_at(name, layer)) for layer in layers):
        raise VectorNameError(
            f"{name!r} is no name of a vector: letters, digits, '_', '-' and '.', up to 64 with -LAYER"
        )
    return name


def name_at(name: str, layer: int) -> str:
    return f"{name}-{layer}"


def write_vector(folder: Path, name: str, vector: FloatArray, record: Mapping[str, Any]) -> Path:
    """``folder/NAME.safetensors``, whole or not at all. vector: ``[hidden_size]``. Raises ``NotWritableError``."""
    path = folder / f"{name}.safetensors"
    write_result(path, save({TENSOR_NAME: vector}, metadata={RECORD: json.dumps(record)}))
    return path


def check_replaces_no_other(path: Path, same: Mapping[str, Any]) -> None:
    """A vector that was learnt otherwise stays: policies may serve it. same: what the record of one that was learnt so
    says. Raises ``NotWritableError``."""
    if path.exists() and not _learnt_so(path, same):
        raise NotWritableError(f"{path}: was learnt otherwise; give another name or folder, or --force to replace it")


def _learnt_so(path: Path, same: Mapping[str, Any]) -> bool:
    try:
        record = read_vector(path)[1]
    except (OSError, SafetensorError, ValueError):
        return False
    return all(record.get(name) == value for name, value in same.items())


def read_vector(path: Path) -> tuple[FloatArray, Mapping[str, Any]]:
    """The vector ``[hidden_size]`` and its record. Raises ``OSError``, ``SafetensorError`` or ``ValueError``."""
    with safe_open(path, framework="numpy") as file:
        if TENSOR_NAME not in file.keys():  # noqa: SIM118 - no mapping, it only has keys()
            raise ValueError(f"has no tensor {TENSOR_NAME!r}")
        vector: FloatArray = np.asarray(file.get_tensor(TENSOR_NAME), np.float32)
        record = json.loads((file.metadata() or {}).get(RECORD, "{}"))
    return vector, record if isinstance(record, dict) else {}


def vector_files(folder: Path) -> Iterator[VectorFile]:
    """Of all files in ``folder``, by name; of those learnt at several layers, by layer."""
    found = []
    for path in folder.glob("*.safetensors"):
        try:
            vector, record = read_vector(path)
        except (OSError, SafetensorError, ValueError) as error:
            found.append(VectorFile(path.stem, 0.0, {}, str(error)))
        else:
            found.append(VectorFile(path.stem, float(np.linalg.norm(vector)), record))
    return iter(sorted(found, key=lambda one: (str(one.record.get("name", one.name)), one.layer or 0, one.name)))


def learnt_layers(folder: Path, name: str) -> tuple[int, ...]:
    """Layers for which ``folder`` has a vector of this name, ascending."""
    tails = [path.stem.removeprefix(f"{name}-") for path in folder.glob(f"{name}-*.safetensors")]
    return tuple(sorted(int(tail) for tail in tails if tail.isdigit()))
