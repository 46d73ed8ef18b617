"""Tensor parallelism: attention heads are split over ranks, and every rank needs what all of them read.

Owns which heads are here and how parts of readouts are put together: a rank fills in its own heads and leaves zeros for
the others, so the sum over ranks is the whole. Hidden states, probes and steering are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from guard.mia.buffers import AttentionShape
from guard.mia.results import FloatArray


@dataclass(frozen=True)
class HeadShard:
    """One rank's heads. Shapes of attention are the rank's own; heads of specs and readouts count over all ranks.

    ``replicas``: ranks that hold the same key head, where there are fewer key heads than ranks. ``add_up``: makes a
    host tensor the sum over ranks, in place; None when there is one rank.
    """

    rank: int = 0
    size: int = 1
    replicas: int = 1
    add_up: Callable[[torch.Tensor], None] | None = None

    def query_head(self, head: int, shape: AttentionShape) -> int | None:
        """Where a head is among this rank's; None when it is another's."""
        local = head - self.rank * shape.query_heads
        return local if 0 <= local < shape.query_heads else None

    def key_head_of(self, head: int, shape: AttentionShape) -> int:
        """The key head, counted over all ranks, that a query head looks at."""
        return head // (shape.group * self.replicas)

    def owned_key_head(self, key_head: int, shape: AttentionShape) -> int | None:
        """Where a key head is among this rank's; None when another rank answers for it."""
        if self.replicas > 1:
            return 0 if key_head * self.replicas == self.rank else None
        local = key_head - self.rank * shape.key_heads
        return local if 0 <= local < shape.key_heads else None

    def merge(self, arrays: Sequence[FloatArray]) -> None:
        """Make each array the sum over ranks, in place. Every rank calls it with arrays of the same shapes."""
        if self.add_up is None or not arrays:
            return
        flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
        self.add_up(flat)
        begin = 0
        for array in arrays:
            array[...] = flat[begin : begin + array.size].numpy().reshape(array.shape)
            begin += array.size


ALONE = HeadShard()
