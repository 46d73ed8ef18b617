"""What one step has read, on its way from the worker to the engine's core.

The tensors are on the host, and complete once the step's output is. Pickled where ranks have processes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from guard.mia.results import QKReadout
from guard.mia.routing import StepLayout

Part = tuple[str, str, int]
"""Request, capture, and first token."""


@dataclass(frozen=True)
class StepRecord:
    """hidden: ``[slots sent, hidden_size]``, the model's dtype. values: float32, logits of probes and behind them
    attention masses, as ``layout`` says. doses: float32. opened_at: ``[gates]`` int32, after the step; empty without
    gates. weights: ``[tokens read, heads, tokens]`` float32. queries: with the keys that came."""

    layout: StepLayout
    hidden: torch.Tensor
    values: torch.Tensor
    doses: torch.Tensor
    opened_at: torch.Tensor
    weights: dict[Part, torch.Tensor] = field(default_factory=dict)
    queries: dict[Part, QKReadout] = field(default_factory=dict)
