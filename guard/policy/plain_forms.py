"""What a single character shows, in ASCII where a letter looks like it.

Owns the forms, of one character and of many at once: each is worked out once in a process, and then looked up.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt

from detectors.deadline import check_deadline

Codes = npt.NDArray[np.uint32]
"""Characters as numbers, one each."""

Places = npt.NDArray[np.int32]
"""Of each character, a place in a text."""

FILLERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Blank though they are letters or symbols; Unicode's categories do not tell."""

HIDDEN = frozenset(("Cc", "Cf", "Cn", "Co", "Me", "Mn"))
"""Categories of characters that show nothing by themselves; accents are among them."""

WORDS_APART = "\t\n\r"
SMALL_CAPITAL = "LATIN LETTER SMALL CAPITAL "
CHANGED_LETTER = re.compile(r"LATIN (SMALL|CAPITAL) LETTER (?:LONG |DOTLESS |SCRIPT )?([A-Z])(?: WITH .+| BAR)?")
"""Names of letters with a hook, a stroke or a tail, which no decomposition takes off."""

CHARACTERS = 0x110000
"""In Unicode, unassigned ones included."""

UNKNOWN = 255
"""In place of a form's length. The longest form has 18 characters."""

AT_ONCE = 2048
"""New characters that are worked out before others may have a turn."""


def plain_form(character: str) -> str:
    """What one character shows, in ASCII where a letter looks like it; empty when it shows nothing.

    Look-alikes of Unicode Technical Standard 39, of the character or of what is left of its compatibility decomposition
    (Unicode Standard Annex 15) without marks.
    """
    if (alike := _look_alike(character)) is not None:
        return alike
    shown = []
    for one in unicodedata.normalize("NFKD", character):
        if one in WORDS_APART or one.isascii():
            shown.append(one if one.isprintable() or one in WORDS_APART else "")
        elif one not in FILLERS and unicodedata.category(one) not in HIDDEN:
            shown.append(_look_alike(one) or one)
    return "".join(shown)


class PlainForms:
    """The forms of all characters that were met: of each, its length and where it begins in one row of characters. What
    is known stays: there are no more than ``CHARACTERS``, at five bytes each and four for each character of a form."""

    def __init__(self) -> None:
        self._lengths: npt.NDArray[np.uint8] = np.full(CHARACTERS, UNKNOWN, np.uint8)
        self._begins: Places = np.zeros(CHARACTERS, np.int32)
        self._row: Codes = np.zeros(0, np.uint32)
        self._adding = threading.Lock()

    def of(self, codes: Codes) -> tuple[Codes, Places]:
        """The characters of all forms in order, and of each the index in ``codes`` of what it is a form of. Raises
        ``TooLateError``."""
        self._learn(codes)
        lengths = self._lengths[codes]
        if lengths.max(initial=0) <= 1:
            # Most texts: nothing has to be counted.
            kept = np.flatnonzero(lengths).astype(np.int32)
            return self._row[self._begins[codes[kept]]], kept
        of = np.repeat(np.arange(len(codes), dtype=np.int32), lengths)
        begun = np.cumsum(lengths, dtype=np.int32) - lengths
        within = np.arange(len(of), dtype=np.int32) - begun[of]
        return self._row[self._begins[codes[of]] + within], of

    def _learn(self, codes: Codes) -> None:
        new = codes[self._lengths[codes] == UNKNOWN]
        if not len(new):
            return
        met = np.zeros(CHARACTERS, np.bool_)
        met[new] = True
        unknown = np.flatnonzero(met)
        for begin in range(0, len(unknown), AT_ONCE):
            check_deadline()
            self._add(unknown[begin : begin + AT_ONCE].tolist())

    def _add(self, unknown: Iterable[int]) -> None:
        with self._adding:
            new = [(one, plain_form(chr(one))) for one in unknown if self._lengths[one] == UNKNOWN]
            joined = "".join(form for _, form in new)
            begin = len(self._row)
            # The row first: whoever sees a length finds what it is the length of.
            self._row = np.concatenate([self._row, codes_of(joined)])
            for one, form in new:
                self._begins[one] = begin
                self._lengths[one] = len(form)
                begin += len(form)


def codes_of(text: str) -> Codes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def text_of(codes: Codes) -> str:
    return codes.astype(np.uint32, copy=False).tobytes().decode("utf-32-le", "surrogatepass")


def _look_alike(character: str) -> str | None:
    """The ASCII letter or digit that looks the same, or is the same digit or a small capital; None without one."""
    if character.isascii():
        return None
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    name = unicodedata.name(character, "")
    if name.startswith(SMALL_CAPITAL) and len(letter := name.removeprefix(SMALL_CAPITAL)) == 1:
        return letter.lower()
    if (changed := CHANGED_LETTER.fullmatch(name)) is not None:
        return changed[2].lower() if changed[1] == "SMALL" else changed[2]
    if len(same := unicodedata.normalize("NFKD", character)) == 1 and same.isascii() and same.isalnum():
        return same
    return _look_alikes().get(character)


@cache
def _look_alikes() -> dict[str, str]:
    """Characters that look like an ASCII letter or digit. Loaded with the first text that needs it."""
    from confusable_homoglyphs import confusables  # type: ignore[import-untyped]

    found = {}
    for character, alike in confusables.confusables_data.items():
        plain = (entry["c"] for entry in alike if len(entry["c"]) == 1 and entry["c"].isascii())
        if not character.isascii() and (letter := next((one for one in plain if one.isalnum()), None)):
            found[character] = letter
    return found
