"""Which layers an option names: ``all``, ``4,8,12``, ``4-12``, or both mixed. Owns that small language."""

from __future__ import annotations

import re

MOST_BY_DEFAULT = 6


class LayersError(ValueError):
    """A list of layers that is none, or that the model does not have."""


def parse_layers(text: str | None, count: int) -> tuple[int, ...]:
    """Ascending, of a model with ``count`` blocks; None: six that are evenly spaced. Raises ``LayersError``."""
    if text is None:
        return tuple(sorted({round(count * i / MOST_BY_DEFAULT) for i in range(1, MOST_BY_DEFAULT + 1)} - {0}))
    if text == "all":
        return tuple(range(1, count + 1))
    found: set[int] = set()
    for part in text.split(","):
        if (match := re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)) is None:
            raise LayersError(f"layers are all, or numbers and ranges as in 4,8-12; not {part.strip()!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= count:
            raise LayersError(f"layers of this model are 1 to {count}; not {part.strip()}")
        found.update(range(first, last + 1))
    return tuple(sorted(found))
