"""What was read of each conversation, on disk: one small file for each, named by a hash of what it depends on.

Owns the files, so that an interrupted run goes on where it was, and so that rows which two runs share are read once.
A file holds numbers only, no text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from detectors.calibration.rows import Message
from guard.mia.results import FloatArray, Readout
from guard.paths import cache_folder


class FeatureError(RuntimeError):
    """The engine gave no readout for a row; the message names the row and the reason, never its text."""


def reason_of(readout: Readout | None) -> str:
    """Why a readout has no values."""
    return "nothing came back" if readout is None else f"{readout.status} {readout.reason}".strip()


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
    """Small files of arrays, one for each conversation. ``key``: what they depend on beside it."""

    def __init__(self, key: str, folder: Path | None = None) -> None:
        self._key = key
        self._folder = cache_folder() / "features" if folder is None else folder

    def path(self, messages: Sequence[Message]) -> Path:
        name = hashlib.sha256(json.dumps([self._key, list(messages)]).encode()).hexdigest()
        return self._folder / name[:2] / f"{name[2:]}.safetensors"

    def has(self, messages: Sequence[Message]) -> bool:
        return self.path(messages).is_file()

    def arrays(self, messages: Sequence[Message]) -> dict[str, npt.NDArray[Any]] | None:
        """None for what is not there; what cannot be read counts as not there."""
        try:
            return load(self.path(messages).read_bytes())
        except (OSError, SafetensorError):
            return None

    def put_arrays(self, messages: Sequence[Message], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write it whole or not at all, so that a run may be killed at any time."""
        path = self.path(messages)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
        partial.replace(path)


class FeatureStore:
    """Readings of one model with one plan. ``model_sha256``: of its weights."""

    def __init__(self, model_sha256: str, plan: Plan, folder: Path | None = None) -> None:
        self.plan = plan
        self._kept = Kept(json.dumps([1, model_sha256, asdict(plan)]), folder)

    def path(self, messages: Sequence[Message]) -> Path:
        return self._kept.path(messages)

    def has(self, messages: Sequence[Message]) -> bool:
        return self._kept.has(messages)

    def get(self, messages: Sequence[Message]) -> Reading | None:
        arrays = self._kept.arrays(messages)
        try:
            return None if arrays is None else Reading(**arrays)
        except TypeError:
            return None

    def put(self, messages: Sequence[Message], reading: Reading) -> None:
        self._kept.put_arrays(
            messages, {name: np.asarray(array, np.float32) for name, array in asdict(reading).items()}
        )
