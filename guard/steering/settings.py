"""Layers and coefficients as options spell them: ``all``, ``4,8-12``; ``0.5,1,2``. Owns that small language."""

from __future__ import annotations

import math
import re
from pathlib import Path

from guard.steering.vector_files import VectorNameError, learnt_layers

MOST_BY_DEFAULT = 6


class SettingsError(ValueError):
    """A list of layers or coefficients that is none, or that model or vector does not have."""


def parse_layers(text: str | None, count: int) -> tuple[int, ...]:
    """Ascending, of a model with ``count`` blocks; None: six that are evenly spaced. Raises ``SettingsError``."""
    if text is None:
        return tuple(sorted({round(count * i / MOST_BY_DEFAULT) for i in range(1, MOST_BY_DEFAULT + 1)} - {0}))
    return _layers(text, tuple(range(1, count + 1)), "this model has layers")


def chosen_layers(folder: Path, name: str, text: str | None) -> tuple[int, ...]:
    """Of those that ``folder`` has a vector ``name`` for; None: all of them. Raises ``SettingsError`` and
    ``VectorNameError``."""
    known = learnt_layers(folder, name)
    if not known:
        raise VectorNameError(f"{folder} has no vector {name}-LAYER.safetensors; guard steer learn {name} makes it")
    return known if text is None else _layers(text, known, f"{name} was learnt at layers")


def parse_coefficients(text: str) -> tuple[float, ...]:
    """Each once, in the order given. Raises ``SettingsError``."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise SettingsError(f"coefficients are numbers with commas between them; not {text!r}") from None
    if not all(math.isfinite(one) and one != 0 for one in found):
        raise SettingsError("a coefficient is a finite number and not 0, which changes nothing")
    return found


def _layers(text: str, known: tuple[int, ...], have: str) -> tuple[int, ...]:
    if text == "all":
        return known
    found: set[int] = set()
    for part in text.split(","):
        if (match := re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)) is None:
            raise SettingsError(f"layers are all, or numbers and ranges as in 4,8-12; not {part.strip()!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        named = {layer for layer in known if first <= layer <= last}
        if not {first, last} <= named:
            raise SettingsError(f"{have} {', '.join(map(str, known))}; not {part.strip()}")
        found |= named
    return tuple(sorted(found))
