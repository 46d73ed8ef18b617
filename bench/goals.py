"""What must be reached, as ratios to vLLM of the same run, and how a miss is said."""

from __future__ import annotations

PER_TOKEN = {"idle": 1.003, "hidden": 1.01, "attention": 1.005, "steered": 1.01, "all": 1.02}
"""Time per output token, by variant: at most."""

FIRST_TOKEN = {"attention": 1.03}
"""Time to the first token: at most."""

SATURATED = 0.99
"""Throughput with more requests than run at once: at least."""

READOUT_MS = 2.0
"""From the end of prefill to the readouts of the prompt, median: at most."""

MEMORY_MIB = 64.0
"""Device memory of the taps, default ones on the 8B shape: at most."""


def at_most(value: float, goal: float | None) -> str:
    """The cell of the goal's column."""
    if goal is None:
        return ""
    return f"≤ {goal:g}: met" if value <= goal else f"≤ {goal:g}: **missed** by {value - goal:.4g}"


def at_least(value: float, goal: float | None) -> str:
    if goal is None:
        return ""
    return f"≥ {goal:g}: met" if value >= goal else f"≥ {goal:g}: **missed** by {goal - value:.4g}"
