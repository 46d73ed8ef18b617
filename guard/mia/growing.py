"""Residual-stream vectors of one capture while they come: one array that has room for more of them, or their sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from guard.mia.results import FloatArray, HiddenMeanReadout, HiddenReadout, RowsReadout

MOST_ROWS_AT_FIRST = 4096
"""Memory that nothing was written to yet costs nothing, up to what a system that counts it beforehand allows."""


@dataclass
class GrowingRows:
    """values: ``[capacity, hidden_size]`` float32, of which the first ``len(positions)`` are there."""

    layer: int
    values: FloatArray
    positions: list[int] = field(default_factory=list)

    @classmethod
    def expecting(cls, layer: int, rows: int, width: int) -> GrowingRows:
        """Room for so many rows, or for the first of very many."""
        return cls(layer, np.empty((max(1, min(rows, MOST_ROWS_AT_FIRST)), width), np.float32))

    def next(self, positions: Sequence[range]) -> FloatArray:
        """Where the values of these tokens belong: ``[tokens, hidden_size]``."""
        begin = len(self.positions)
        self.positions.extend(chain.from_iterable(positions))
        end = len(self.positions)
        if end > len(self.values):
            grown = np.empty((max(end, 2 * len(self.values)), self.values.shape[1]), np.float32)
            grown[:begin] = self.values[:begin]
            self.values = grown
        return self.values[begin:end]

    def only(self) -> HiddenReadout:
        """Of a capture of one token."""
        return HiddenReadout("complete", self.layer, self.positions[0], None, self.values[0])

    def readout(self, since: int = 0) -> RowsReadout:
        """Of the rows from ``since`` on."""
        values = self.values[since : len(self.positions)]
        return RowsReadout("complete", self.layer, tuple(self.positions[since:]), values=values)


@dataclass
class RowSum:
    """total: ``[hidden_size]`` float64, the sum of the values of the tokens in the ranges [start, end) of ``tokens``,
    which come in order."""

    layer: int
    total: npt.NDArray[np.float64]
    tokens: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, layer: int, width: int) -> RowSum:
        return cls(layer, np.zeros(width))

    def add(self, positions: Sequence[range], values: FloatArray) -> None:
        """values: ``[tokens, hidden_size]`` float32."""
        self.total += values.sum(axis=0, dtype=np.float64)
        for one in positions:
            begin = self.tokens.pop()[0] if self.tokens and self.tokens[-1][1] == one.start else one.start
            self.tokens.append((begin, one.stop))

    def mean(self) -> HiddenMeanReadout:
        count = sum(end - start for start, end in self.tokens)
        values = (self.total / count).astype(np.float32)
        return HiddenMeanReadout("complete", self.layer, tuple(self.tokens), values)
