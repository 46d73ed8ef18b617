"""Residual-stream vectors of one capture while they come: one array that has room for more of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from guard.mia.results import HiddenReadout, RowsReadout

MOST_ROWS_AT_FIRST = 4096
"""Memory that nothing was written to yet costs nothing, up to what a system that counts it beforehand allows."""


@dataclass
class GrowingRows:
    """values: ``[capacity, hidden_size]`` float32, of which the first ``len(positions)`` are there."""

    layer: int
    values: torch.Tensor
    positions: list[int] = field(default_factory=list)

    @classmethod
    def expecting(cls, layer: int, rows: int, width: int) -> GrowingRows:
        """Room for so many rows, or for the first of very many."""
        return cls(layer, torch.empty(max(1, min(rows, MOST_ROWS_AT_FIRST)), width))

    def next(self, positions: Sequence[range]) -> torch.Tensor:
        """Where the values of these tokens belong: ``[tokens, hidden_size]``."""
        begin = len(self.positions)
        self.positions.extend(chain.from_iterable(positions))
        end = len(self.positions)
        if end > len(self.values):
            grown = torch.empty(max(end, 2 * len(self.values)), self.values.shape[1])
            grown[:begin] = self.values[:begin]
            self.values = grown
        return self.values[begin:end]

    def only(self) -> HiddenReadout:
        """Of a capture of one token."""
        return HiddenReadout("complete", self.layer, self.positions[0], None, self.values[0].numpy())

    def readout(self, since: int = 0) -> RowsReadout:
        """Of the rows from ``since`` on."""
        values = self.values[since : len(self.positions)].numpy()
        return RowsReadout("complete", self.layer, tuple(self.positions[since:]), values=values)
