"""Every tensor that the taps read or write, allocated in one place and never moved.

Owns allocation; how much is ``sizing``'s. ``taps`` binds these to layers, ``routing`` fills the control block before
a step, ``readouts`` reads the pools after it. What would not fit is refused before anything is allocated.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import psutil
import torch

from guard.mia.control import Control
from guard.mia.engine_config import EngineConfig
from guard.mia.ops import SHUT
from guard.mia.sharding import HeadShard
from guard.mia.sizing import LayerHeads, Sizing
from guard.mia.sizing import StepLimits as StepLimits

logger = logging.getLogger("vllm.mia")
"""vLLM's log has all below ``vllm``."""


@dataclass(frozen=True)
class AttentionShape:
    """What the attention of one layer needs to be recomputed from its queries and keys.

    ``scale`` multiplies the logits; ``softcap`` is 0 when there is none; ``window`` is the sliding window in tokens or
    None. Values come from the loaded layer, never from the model's configuration file.
    """

    query_heads: int
    key_heads: int
    head_size: int
    scale: float
    softcap: float
    window: int | None

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.query_heads // self.key_heads


@dataclass(frozen=True)
class GatherTap:
    """Rows to copy out at one place. ``number`` is its place in the control block; out: ``[capacity, width]``, the
    model's dtype, which several taps may share."""

    number: int
    out: torch.Tensor


@dataclass(frozen=True)
class QueryTap:
    """Queries to copy out at one layer. ``heads``: those of this rank that requests may ask for; a token takes a slot
    of ``out`` for each of them, in this order."""

    number: int
    out: torch.Tensor
    heads: tuple[int, ...]


@dataclass
class TapBuffers:
    """All taps of one engine, by layer number (transformers' numbering: the embedding is 0, blocks count from 1).

    hidden_pool: ``[capacity, hidden_size]``, query_pool: ``[capacity, largest head size]``, the model's dtype. ``key``
    is empty where keys are read from vLLM's cache. bank: ``[vectors, hidden_size]`` float32. dose_limit: ``[1]``
    float32. doses: ``[capacity]`` float32. opened_at: ``[gates]`` int32, the token from which on a gate lets steering
    act; sums: ``[gates]`` float32, of readouts that are averaged.
    """

    sizing: Sizing
    control: Control
    hidden_pool: torch.Tensor
    query_pool: torch.Tensor
    hidden: dict[int, GatherTap]
    query: dict[int, QueryTap]
    key: dict[int, GatherTap]
    steer: dict[int, int]
    attention_shapes: dict[int, AttentionShape]
    bank: torch.Tensor
    dose_limit: torch.Tensor
    doses: torch.Tensor
    opened_at: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def allocate(
        cls,
        config: EngineConfig,
        hidden_size: int,
        shapes: dict[int, AttentionShape],
        limits: StepLimits,
        bank: torch.Tensor,
        dtype: torch.dtype,
        shard: HeadShard,
        gathers_keys: bool,
    ) -> TapBuffers:
        """``shapes`` has an entry for each attention layer of ``config``; ``bank`` is ``[capacity, hidden_size]``.

        Raises ``BuffersTooLargeError``.
        """
        device = bank.device
        layers = sorted(shapes)
        heads = {n: local_heads(config, shard, n, shapes[n]) for n in layers}
        sizing = Sizing(
            config,
            limits,
            hidden_size,
            dtype.itemsize,
            {n: LayerHeads(len(heads[n]), shapes[n].key_heads, shapes[n].head_size) for n in layers},
            gathers_keys,
        )
        sizing.check_device(free_bytes(device), taken_bytes=bank.nbytes)
        sizing.check_host(psutil.virtual_memory().available)
        logger.info("mia: %s; a request: %s; host: %s", sizing.taps_text, sizing.request_text, sizing.host_text)
        numbers = iter(range(sizing.taps))

        def pool(slots: int, width: int) -> torch.Tensor:
            return torch.zeros(slots, width, dtype=dtype, device=device)

        hidden_pool = pool(sizing.hidden_slots, hidden_size)
        query_pool = pool(sizing.query_slots, sizing.query_width)

        def queries(size: int) -> torch.Tensor:
            # One tensor where that will do: a compiled graph treats views of it as strangers that overlap.
            return query_pool if size == query_pool.shape[1] else query_pool[:, :size]

        return cls(
            sizing=sizing,
            control=Control(sizing.taps, sizing.entry_words, device),
            hidden_pool=hidden_pool,
            query_pool=query_pool,
            hidden={n: GatherTap(next(numbers), hidden_pool) for n in config.tapped_layers},
            query={n: QueryTap(next(numbers), queries(shapes[n].head_size), heads[n]) for n in layers},
            key={
                n: GatherTap(next(numbers), pool(limits.tokens, shapes[n].key_heads * shapes[n].head_size))
                for n in (layers if gathers_keys else [])
            },
            steer={n: next(numbers) for n in sorted(config.steering_layers)},
            attention_shapes=shapes,
            bank=bank,
            dose_limit=torch.tensor([config.max_relative_dose or float("inf")], device=device),
            doses=torch.zeros(sizing.doses, device=device),
            opened_at=torch.full((sizing.gates,), SHUT, dtype=torch.int32, device=device),
            sums=torch.zeros(sizing.gates, device=device),
        )

    def sizes_bytes(self) -> dict[str, int]:
        """Device memory by what it is for."""
        return self.sizing.device_bytes


def free_bytes(device: torch.device) -> int:
    """What can still be allocated: on CUDA with what torch keeps of what was freed."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def local_heads(config: EngineConfig, shard: HeadShard, layer: int, shape: AttentionShape) -> tuple[int, ...]:
    """The configured heads of one layer that this rank has, by their numbers on this rank."""
    local = (shard.query_head(head, shape.query_heads) for at, head in config.attention_heads if at == layer)
    return tuple(sorted(head for head in local if head is not None))
