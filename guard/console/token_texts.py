"""Tokens as people can read them: from the names that tokens have in a vocabulary to the text that each adds.

Owns two spellings: bytes as printable letters (GPT-2's and its heirs'; the table is OpenAI's ``bytes_to_unicode``)
and SentencePiece's, with ``▁`` for a space and ``<0x0A>`` for a byte. Names of neither kind are texts already.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cache

SPACE = "▁"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_texts(names: Sequence[str]) -> list[str]:
    """What each token adds to the text. A character of several tokens is the last one's."""
    as_letters = any("Ġ" in name or "Ċ" in name for name in names)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(_letters(name) if as_letters else _pieces(name)) for name in names]


def _letters(name: str) -> bytes:
    table = _byte_of_letter()
    if all(letter in table for letter in name):
        return bytes(table[letter] for letter in name)
    return name.encode("utf-8", "replace")  # special tokens are spelt as they are


def _pieces(name: str) -> bytes:
    if match := BYTE.fullmatch(name):
        return bytes([int(match[1], 16)])
    return name.replace(SPACE, " ").encode("utf-8", "replace")


@cache
def _byte_of_letter() -> dict[str, int]:
    """Printable bytes stand for themselves; the others, in order, for the characters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
