"""The ``hidden_states`` analyzer: what was read, as it is or reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from guard.mia.analyzers.probes import Probes, load_probes, present


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mean(dim=0) if tensor.dim() > 1 else tensor


REDUCTIONS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda tensor: tensor,
    "mean": _mean,
    "norm": lambda tensor: float(tensor.norm()),
}
"""``reduce``: the tensors; their mean over tokens; their length as a number, over all tokens together."""


class HiddenStatesAnalyzer:
    """``{"hidden_states": {layer: [one value for each request]}}``; layers have the numbers that were asked for."""

    def __init__(
        self, hook_dir: str | Path | None = None, layer_to_heads: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.hook_dir = hook_dir

    def analyze(
        self, analyzer_spec: Mapping[str, Any] | None = None, run_id: str | None = None, probes: Probes | None = None
    ) -> dict[str, Any]:
        """Raises ``ValueError`` for an unknown ``reduce``, ``MissingReadoutError`` when a value is missing."""
        name = (analyzer_spec or {}).get("reduce", "none")
        if name not in REDUCTIONS:
            raise ValueError(f"reduce is one of {', '.join(REDUCTIONS)}, not {name!r}")
        cache = (load_probes(self.hook_dir, run_id) if probes is None else probes).get("hs_cache", {})
        return {
            "hidden_states": {
                layer: [REDUCTIONS[name](present(entry, "hidden_states", i)) for i in range(len(entry["reasons"]))]
                for layer, entry in cache.items()
            }
        }
