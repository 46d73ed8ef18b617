"""How the time of one run is shared: each phase gets its weight's part of what is left, and repeats until it is used.

A phase that needs less leaves the rest to those after it; one that is cut short has measured all variants equally
often, since what is repeated is always a whole round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Shares:
    """``weights`` by phase, in the order in which they run. ``deadline_s``: on ``clock``."""

    weights: dict[str, float]
    deadline_s: float
    clock: Callable[[], float] = time.monotonic

    def take(self, phase: str) -> float:
        """Seconds that ``phase`` may use now. Each phase takes once, before those behind it."""
        total = sum(self.weights.values())
        return max(0.0, self.deadline_s - self.clock()) * self.weights.pop(phase) / total

    def repeat(self, phase: str, times: int, round_of: Callable[[int], None]) -> int:
        """Run ``round_of(0)``, ``round_of(1)``, ... and return how many rounds there were.

        At least one, unless the deadline has passed; another only where the longest so far still fits.
        """
        share_s = self.take(phase)
        if share_s == 0.0:
            return 0
        started_s = self.clock()
        longest_s = 0.0
        for repetition in range(times):
            before_s = self.clock()
            if repetition and before_s - started_s + longest_s > share_s:
                return repetition
            round_of(repetition)
            longest_s = max(longest_s, self.clock() - before_s)
        return times
