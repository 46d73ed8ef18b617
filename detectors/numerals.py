"""A score or threshold in figures: few of them, but never so few that it looks like another number that it stands
beside, or like 1. ``guard/console/static/format.js`` does the same in the console."""

from __future__ import annotations

FEWEST = 4
"""Significant figures."""

APART = 1e-3
"""Numbers that differ by a larger part of the larger one do not look alike in so few figures: the last of these counts
no more."""

ENOUGH = 17
"""Two different floats differ within these."""


def numeral(value: float, *beside: float) -> str:
    """``beside``: what it is compared with. Rounding to as many figures keeps the order of two numbers, so what does
    not look equal is on its own side."""
    others = [other for other in (*beside, 1.0) if other != value]
    # Most of what is judged, and told, lies far from its thresholds.
    for other in others:
        if not abs(other - value) > APART * max(abs(other), abs(value)):
            break
    else:
        return f"{value:.{FEWEST}g}"
    for figures in range(FEWEST, ENOUGH):
        told = f"{value:.{figures}g}"
        if all(f"{other:.{figures}g}" != told for other in others):
            return told
    return f"{value:.{ENOUGH}g}"
