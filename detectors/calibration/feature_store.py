"""What was read of each conversation, on disk: one small file for each, named by a hash of what it depends on.

Owns the files, so that an interrupted run goes on where it was, and so that rows which two runs share are read once.
A file holds numbers only, no text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from detectors.calibration.rows import Message
from guard.mia.results import FloatArray
from guard.paths import cache_folder
from guard.whole_file import write_whole


class FeatureError(RuntimeError):
    """The engine gave no readout for a row; the message names the row and the reason, never its text."""


@dataclass(frozen=True)
class Reading:
    """One conversation's numbers, float32.

    last: ``[layers, hidden_size]``, states of the last prompt token. mass: ``[heads, 2]``, attention from there on
    instruction and data. windows: ``[windows, window layers, hidden_size]``, mean states of consecutive tokens of the
    data. window_tokens: ``[windows]``, how many each is the mean of.
    """

    last: FloatArray
    mass: FloatArray
    windows: FloatArray
    window_tokens: FloatArray

    @property
    def tokens(self) -> int:
        """Of the data."""
        return int(self.window_tokens.sum())


@dataclass(frozen=True)
class Plan:
    """What is read of every conversation. Layers and heads count layers from 1."""

    layers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    window_layers: tuple[int, ...]
    window_tokens: int


class Kept:
    """Small files of arrays, one for each conversation. ``key``: what they depend on beside it; ``names``: of the
    arrays. A file that is cut off, or of other arrays, counts as not there, so that its row is read again."""

    def __init__(self, key: str, names: Iterable[str], folder: Path | None = None) -> None:
        self._key = key
        self._names = set(names)
        self._folder = cache_folder() / "features" if folder is None else folder

    def path(self, messages: Sequence[Message]) -> Path:
        name = hashlib.sha256(json.dumps([self._key, list(messages)]).encode()).hexdigest()
        return self._folder / name[:2] / f"{name[2:]}.safetensors"

    def has(self, messages: Sequence[Message]) -> bool:
        try:
            # Opening compares what the header says with the file's size, and reads no array.
            with safe_open(self.path(messages), "numpy") as file:
                return set(file.keys()) == self._names
        except (OSError, SafetensorError):
            return False

    def arrays(self, messages: Sequence[Message]) -> dict[str, npt.NDArray[Any]] | None:
        """None for what is not there."""
        try:
            arrays = load(self.path(messages).read_bytes())
        except (OSError, SafetensorError):
            return None
        return arrays if arrays.keys() == self._names else None

    def put_arrays(self, messages: Sequence[Message], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Whole or not at all. Raises ``FeatureError``."""
        path = self.path(messages)
        try:
            write_whole(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
        except OSError as error:
            raise FeatureError(f"{path.parent}: what was read cannot be kept: {error.strerror}") from None


class FeatureStore:
    """Readings of one model with one plan. ``model_sha256``: of its weights."""

    def __init__(self, model_sha256: str, plan: Plan, folder: Path | None = None) -> None:
        self.plan = plan
        names = [field.name for field in fields(Reading)]
        self._kept = Kept(json.dumps([1, model_sha256, asdict(plan)]), names, folder)

    def path(self, messages: Sequence[Message]) -> Path:
        return self._kept.path(messages)

    def has(self, messages: Sequence[Message]) -> bool:
        return self._kept.has(messages)

    def get(self, messages: Sequence[Message]) -> Reading | None:
        arrays = self._kept.arrays(messages)
        return None if arrays is None else Reading(**arrays)

    def put(self, messages: Sequence[Message], reading: Reading) -> None:
        self._kept.put_arrays(
            messages, {name: np.asarray(array, np.float32) for name, array in asdict(reading).items()}
        )
