"""Keys read where vLLM keeps them: in its paged cache, through the block table.

Prefix caching, chunks and preemption are right by construction, and no key is copied for a request that asks for a
number. Knows the cache's tensors, not the engine that they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from guard.mia import kernels
from guard.mia.buffers import AttentionShape
from guard.mia.plan import RequestPlan
from guard.mia.tracking import Tracked

ALIGNED_ELEMENTS = 8
"""The kernel loads keys by so many elements at once: head sizes and strides are multiples of it."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache. kv: ``[blocks, key_heads, block size, 2 head_size]``, a key and behind it a value.
    block_table: ``[requests, blocks]`` int32."""

    kv: torch.Tensor
    block_table: torch.Tensor
    shape: AttentionShape

    def table_row(self) -> list[int]:
        """What ``kernels.span_mass`` takes of a layer."""
        kv, table = self.kv, self.block_table
        places = [kv.data_ptr(), *kv.stride()[:3], table.data_ptr(), table.stride(0), kv.shape[2]]
        return [*places, self.shape.window or 0, self.shape.head_size]


class PagedKeys:
    """The caches of all layers with attention taps, in the order of their numbers."""

    def __init__(self, caches: dict[int, LayerCache], queries: torch.Tensor) -> None:
        self._caches = {layer: caches[layer] for layer in sorted(caches)}
        self._queries = queries
        self._layers = torch.tensor([one.table_row() for one in self._caches.values()], device=queries.device)
        scales = [[one.shape.scale, one.shape.softcap] for one in self._caches.values()]
        self._scales = torch.tensor(scales, dtype=torch.float32, device=queries.device)
        self._dtype = next(iter(caches.values())).kv.dtype

    def keys(self, tracked: Tracked, one: RequestPlan, layer: int, start: int, end: int) -> torch.Tensor:
        """Of a layer with a window, keys that no token from the last step on can see may be another request's."""
        cache = self._caches[layer]
        block, head_size = cache.kv.shape[2], cache.shape.head_size
        first = start // block
        numbers = cache.block_table[one.block_row, first : -(-end // block)].long()
        pages = cache.kv[numbers, :, :, :head_size].transpose(1, 2).flatten(0, 1)
        return pages[start - first * block : end - first * block].float()

    def masses(self, entries: int, tables: torch.Tensor, values: torch.Tensor) -> bool:
        kernels.span_mass(self._queries, tables, 0, entries, self._layers, self._scales, values, self._dtype)
        return True
