"""What every named set gives: texts to use as they are, documents to carry attacks, and attacks to put into them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from detectors.calibration.sources import Seed, Text

T = TypeVar("T")


@dataclass(frozen=True)
class Content:
    """``documents``, and ``goals`` in ``templates`` (with the placeholder ``{goal}``), are composed inside their split:
    none of the three crosses splits."""

    texts: tuple[Text, ...] = ()
    documents: tuple[Seed, ...] = ()
    templates: tuple[Seed, ...] = ()
    goals: tuple[Seed, ...] = ()
    rows_per_document: int = 1
    rows_per_injection: int = 1


def pick(items: Sequence[T], count: int, key: str) -> list[T]:
    """``count`` different items, always the same for the same key; all of them where there are fewer."""
    order = sorted(range(len(items)), key=lambda i: hashlib.sha256(f"{key}|{i}".encode()).digest())
    return [items[i] for i in order[:count]]


def shortened(text: str, characters: int) -> str:
    """At most ``characters``, cut between paragraphs, lines or words where that is possible in the second half."""
    if len(text) <= characters:
        return text
    for separator in ("\n\n", "\n", ". ", " "):
        at = text.rfind(separator, characters // 2, characters)
        if at > 0:
            return text[: at + len(separator)].rstrip()
    return text[:characters]


def number_of(key: str) -> int:
    """Always the same for the same key, and as if drawn."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
