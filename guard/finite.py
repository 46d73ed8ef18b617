"""Numbers that options give: finite ones. Nothing is as high as ``nan``, and everything is below ``inf``: a command
that took these would find nothing, or let everything pass, and not say why."""

from __future__ import annotations

from math import isfinite
from typing import TypeVar

import typer

Given = TypeVar("Given", float | None, list[float] | None)


def finite_number(text: str) -> float:
    """Raises ``ValueError``."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def finite(given: Given) -> Given:
    """For ``typer.Option(callback=...)`` of every option that is a number, or several, and may have a fraction."""
    numbers = given if isinstance(given, list) else [given]
    if not all(number is None or isfinite(number) for number in numbers):
        raise typer.BadParameter("has to be a finite number")
    return given
