"""Tensor parallelism: attention heads are split over ranks, and every rank needs what all of them read.

Owns which heads are here and how parts of readouts are put together: a rank fills in its own heads and leaves zeros for
the others, so the sum over ranks is the whole. Hidden states, probes and steering are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadShard:
    """One rank's heads. Numbers of heads are the rank's own; heads of specs and readouts count over all ranks.

    ``replicas``: ranks that hold the same key head, where there are fewer key heads than ranks. ``add_up``: makes a
    tensor the sum over ranks, in place, on the device that it is on; None when there is one rank.
    """

    rank: int = 0
    size: int = 1
    replicas: int = 1
    add_up: Callable[[torch.Tensor], None] | None = None

    def query_head(self, head: int, query_heads: int) -> int | None:
        """Where a head is among this rank's; None when it is another's."""
        local = head - self.rank * query_heads
        return local if 0 <= local < query_heads else None

    def key_head_of(self, head: int, group: int) -> int:
        """The key head, counted over all ranks, that a query head looks at."""
        return head // (group * self.replicas)

    def owned_key_head(self, key_head: int, key_heads: int) -> int | None:
        """Where a key head is among this rank's; None when another rank answers for it."""
        if self.replicas > 1:
            return 0 if key_head * self.replicas == self.rank else None
        local = key_head - self.rank * key_heads
        return local if 0 <= local < key_heads else None

    def merge(self, parts: Sequence[torch.Tensor]) -> None:
        """Make each tensor the sum over ranks, in place. Every rank calls it with tensors of the same shapes."""
        if self.add_up is None or not parts:
            return
        flat = torch.cat([part.reshape(-1) for part in parts])
        self.add_up(flat)
        begin = 0
        for part in parts:
            part.copy_(flat[begin : begin + part.numel()].view(part.shape))
            begin += part.numel()


ALONE = HeadShard()
