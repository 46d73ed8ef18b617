"""What one step has read, on its way from the worker to the engine's core.

The tensors are on the host, and complete once the step's output is. Pickled where ranks have processes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from guard.mia.plan import StepLayout
from guard.mia.results import QKReadout
from guard.mia.row_ring import Slab

Rows = tuple[str, str, int]
"""Request, capture, and first token."""


@dataclass(frozen=True)
class StepRecord:
    """hidden: where ``[slots sent, hidden_size]`` lie, in the model's dtype; None when there are none, or they found no
    space. values: float32, logits of probes and behind them
    attention masses, as ``layout`` says. doses: float32. opened_at: ``[gates]`` int32, after the step; empty without
    gates. weights: ``[tokens read, heads, tokens]`` float32. queries: with the keys that came."""

    layout: StepLayout
    hidden: Slab | None
    values: torch.Tensor
    doses: torch.Tensor
    opened_at: torch.Tensor
    weights: dict[Rows, torch.Tensor] = field(default_factory=dict)
    queries: dict[Rows, QKReadout] = field(default_factory=dict)
