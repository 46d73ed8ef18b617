"""Texts that a model cannot read, or that have nothing in them to read. Owns what counts as blank."""

from __future__ import annotations

import unicodedata

FILLERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and signs that are drawn as nothing."""

VARIATION_SELECTORS = (("\ufe00", "\ufe0f"), ("\U000e0100", "\U000e01ef"))


def is_blank(text: str) -> bool:
    """Whether there is nothing to see: spaces, controls, zero-width characters and fillers alone, or no character."""
    return all(_unseen(character) for character in text)


def mistake_in(text: str) -> str | None:
    """What makes a text one that no model can judge, behind its name: "is blank"; None for any other."""
    if is_blank(text):
        return "is blank"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "has half of a surrogate pair in it, which is no character"
    return None


def readable(text: str) -> str:
    """The text. Raises ``ValueError`` where ``mistake_in`` finds one; for fields of pydantic's models."""
    if mistake := mistake_in(text):
        raise ValueError(mistake)
    return text


def _unseen(character: str) -> bool:
    # Separators, controls, format characters such as the zero-width space.
    return (
        unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf")
        or character in FILLERS
        or any(first <= character <= last for first, last in VARIATION_SELECTORS)
    )
