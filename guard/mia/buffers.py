"""Every tensor that the taps read or write, allocated in one place and never moved.

Owns allocation and sizes. ``taps`` binds these to layers, ``routing`` fills them before a step, ``readouts`` reads them
after it. Sizes follow from the configured taps alone; ``size_bytes`` is logged at start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from guard.mia.engine_config import EngineConfig
from guard.mia.spec import MAX_VECTORS_PER_LAYER

IntArray = npt.NDArray[np.int64]


@dataclass
class GatherTap:
    """Rows to copy out at one place.

    rows: ``[capacity]`` int64; count: ``[1]`` int64, host; out: ``[capacity, width]``, the model's dtype.
    """

    rows: torch.Tensor
    count: torch.Tensor
    out: torch.Tensor

    @classmethod
    def allocate(cls, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> GatherTap:
        return cls(
            rows=torch.zeros(capacity, dtype=torch.int64, device=device),
            count=torch.zeros(1, dtype=torch.int64),
            out=torch.zeros(capacity, width, dtype=dtype, device=device),
        )

    def fill(self, rows: IntArray) -> None:
        self.rows[: len(rows)].copy_(torch.from_numpy(rows))
        self.count.fill_(len(rows))

    def clear(self) -> None:
        self.count.zero_()

    @property
    def capacity(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class SteerEntries:
    """What one layer's steering does in one step, pass by pass. All but ``bounds``: ``[entries]``, host."""

    rows: IntArray
    slots: IntArray
    modes: IntArray
    coefficients: npt.NDArray[np.float32]
    targets: npt.NDArray[np.float32]
    keep_norm: npt.NDArray[np.bool_]
    bounds: IntArray


@dataclass
class SteerTap:
    """Rows to steer after one layer, as ``ops.steer_rows`` takes them."""

    rows: torch.Tensor
    slots: torch.Tensor
    modes: torch.Tensor
    coefficients: torch.Tensor
    targets: torch.Tensor
    keep_norm: torch.Tensor
    bounds: torch.Tensor
    bank: torch.Tensor
    dose_limit: torch.Tensor
    doses: torch.Tensor

    @classmethod
    def allocate(cls, capacity: int, bank: torch.Tensor, dose_limit: torch.Tensor) -> SteerTap:
        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(capacity, dtype=dtype, device=bank.device)

        return cls(
            rows=zeros(torch.int64),
            slots=zeros(torch.int64),
            modes=zeros(torch.int64),
            coefficients=zeros(torch.float32),
            targets=zeros(torch.float32),
            keep_norm=zeros(torch.bool),
            bounds=torch.zeros(MAX_VECTORS_PER_LAYER + 1, dtype=torch.int64),
            bank=bank,
            dose_limit=dose_limit,
            doses=zeros(torch.float32),
        )

    def fill(self, entries: SteerEntries) -> None:
        n = len(entries.rows)
        for buffer, values in (
            (self.rows, entries.rows),
            (self.slots, entries.slots),
            (self.modes, entries.modes),
            (self.coefficients, entries.coefficients),
            (self.targets, entries.targets),
            (self.keep_norm, entries.keep_norm),
        ):
            buffer[:n].copy_(torch.from_numpy(values))
        self.bounds.copy_(torch.from_numpy(entries.bounds))

    def clear(self) -> None:
        self.bounds.zero_()

    @property
    def size_bytes(self) -> int:
        entries = (self.rows, self.slots, self.modes, self.coefficients, self.targets, self.keep_norm, self.doses)
        return sum(buffer.nbytes for buffer in entries)


@dataclass(frozen=True)
class StepLimits:
    """What one engine step can hold: requests and tokens."""

    requests: int
    tokens: int


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


@dataclass
class TapBuffers:
    """All taps of one engine, by layer number (transformers' numbering: the embedding is 0, blocks count from 1)."""

    hidden: dict[int, GatherTap]
    query: dict[int, GatherTap]
    key: dict[int, GatherTap]
    steer: dict[int, SteerTap]
    attention_shapes: dict[int, AttentionShape]

    @classmethod
    def allocate(
        cls,
        config: EngineConfig,
        hidden_size: int,
        shapes: dict[int, AttentionShape],
        limits: StepLimits,
        bank: torch.Tensor,
        dtype: torch.dtype,
    ) -> TapBuffers:
        """``shapes`` has an entry for each attention layer of ``config``; ``bank`` is ``[capacity, hidden_size]``."""
        device = bank.device
        layers = sorted({layer for layer, _ in config.attention_heads})
        hidden_rows = config.max_hidden_rows_per_step or limits.requests
        query_rows = config.max_query_rows_per_step or limits.requests
        dose_limit = torch.tensor([config.max_relative_dose or float("inf")], device=device)
        return cls(
            hidden={n: GatherTap.allocate(hidden_rows, hidden_size, dtype, device) for n in config.tapped_layers},
            query={
                n: GatherTap.allocate(query_rows, shapes[n].query_heads * shapes[n].head_size, dtype, device)
                for n in layers
            },
            key={
                n: GatherTap.allocate(limits.tokens, shapes[n].key_heads * shapes[n].head_size, dtype, device)
                for n in layers
            },
            steer={
                n: SteerTap.allocate(MAX_VECTORS_PER_LAYER * limits.tokens, bank, dose_limit)
                for n in sorted(config.steering_layers)
            },
            attention_shapes=shapes,
        )

    @property
    def size_bytes(self) -> int:
        taps = [*self.hidden.values(), *self.query.values(), *self.key.values()]
        gathered = sum(tap.out.nbytes + tap.rows.nbytes for tap in taps)
        steered = sum(tap.size_bytes for tap in self.steer.values())
        bank = next((tap.bank.nbytes for tap in self.steer.values()), 0)
        return gathered + steered + bank

    def clear(self) -> None:
        for taps in (self.hidden, self.query, self.key):
            for gather in taps.values():
                gather.clear()
        for steer in self.steer.values():
            steer.clear()
