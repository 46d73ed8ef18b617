"""States of every token of the data, for probes that pool over tokens: kept on disk, read one conversation at a time.

Owns these files and the passes over them. All tokens of thousands of conversations are gigabytes, so that they are read
at few layers, kept as float16, and never held in memory together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from detectors.calibration.captures import Captures, of_data
from detectors.calibration.engine_states import states_of
from detectors.calibration.feature_store import FeatureError, Kept
from detectors.calibration.rows import Row
from guard.mia.results import FloatArray, Readouts

TOKEN_LAYERS = 3
"""At how many evenly spaced ones of the layers at which means are kept."""

SCALE = "scale"
LARGEST = 65504.0
"""That float16 holds."""


@dataclass(frozen=True)
class TokenStates:
    """Of rows, each in its own file."""

    layers: tuple[int, ...]
    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def part(self, index: Any) -> TokenStates:
        """Of the rows at ``index``."""
        return TokenStates(self.layers, tuple(self.paths[i] for i in np.arange(len(self.paths))[index]))

    def __add__(self, other: TokenStates) -> TokenStates:
        return TokenStates(self.layers, (*self.paths, *other.paths))

    def of(self, row: int, layer: int) -> FloatArray:
        """``[tokens, hidden_size]`` float32. Raises ``FeatureError``."""
        path = self.paths[row]
        try:
            with safe_open(path, "numpy") as file:
                states = file.get_tensor(f"layer{layer}").astype(np.float32)
                return np.asarray(states * file.get_tensor(SCALE)[self.layers.index(layer)])
        except (OSError, SafetensorError) as error:
            # So that the next run reads it again.
            path.unlink(missing_ok=True)
            raise FeatureError(f"{path}: cannot be read ({error}); run the command once more") from None

    def means(self, layer: int) -> FloatArray:
        """``[rows, hidden_size]``: over all tokens of each."""
        return np.stack([self.of(row, layer).mean(axis=0) for row in range(len(self))])


class TokenStore:
    """Reads and keeps them, of one model. ``model_sha256``: as for ``FeatureStore``."""

    def __init__(self, model_sha256: str, layers: tuple[int, ...], folder: Path | None = None) -> None:
        self.layers = layers
        self.captures = Captures(hidden={f"tokens{layer}": of_data(layer) for layer in layers})
        names = [SCALE, *(f"layer{layer}" for layer in layers)]
        self._kept = Kept(json.dumps([1, "tokens", model_sha256, layers]), names, folder)

    def lacks(self, row: Row) -> bool:
        return not self._kept.has(row.messages)

    def take(self, row: Row, readouts: Readouts) -> None:
        states = [states_of(readouts, f"tokens{layer}", row.named, layer) for layer in self.layers]
        # A few components of some models are larger than float16 holds.
        scale = np.array([max(1.0, float(np.abs(one).max()) / LARGEST) for one in states], np.float32)
        halves = {
            f"layer{layer}": (one / by).astype(np.float16)
            for layer, one, by in zip(self.layers, states, scale, strict=True)
        }
        self._kept.put_arrays(row.messages, {SCALE: scale, **halves})

    def states(self, rows: Sequence[Row]) -> TokenStates:
        return TokenStates(self.layers, tuple(self._kept.path(row.messages) for row in rows))
