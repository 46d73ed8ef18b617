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

FILLERS = frozenset("\u115f\u1160\u2800\u3164\uffa0\ufffc\U0001d159")
"""Blank though they are letters or symbols, or for a thing that is not there; Unicode's categories do not tell."""

HIDDEN = frozenset(("Cc", "Cf", "Cn", "Co", "Me", "Mn"))
"""Categories of characters that show nothing by themselves; accents are among them, and all that Unicode calls
``Default_Ignorable_Code_Point`` but for the fillers."""

WORDS_APART = "\t\n\r"
SMALL_CAPITAL = "LATIN LETTER SMALL CAPITAL "
CHANGED_LETTER = re.compile(
    r"LATIN (?:(SMALL|CAPITAL|EPIGRAPHIC) )?(?:CAPITAL )?LETTER (?:(?!WITH|SHARP|LETTER)[A-Z-]+ )*"
    r"([A-Z])(?: WITH .+| BAR| ROTUNDA| LONGA)?"
)
"""Names of letters with a hook, a stroke or a tail, of another hand, or on their heads, which no decomposition takes
off."""

ENCLOSED_LETTER = re.compile(
    r"(?:.+ )?(?:CIRCLED|SQUARED|PARENTHESIZED|BRACKETED|INDICATOR SYMBOL)(?: LATIN)?"
    r"(?: (SMALL|CAPITAL))? LETTER ([A-Z])"
)
"""Names of letters in a circle, a square or brackets, and of those that make flags; some have no decomposition."""

ENCLOSED_NUMBER = re.compile(r".*\b(?:CIRCLED|PARENTHESIZED|FULL STOP|COMMA)\b.*")

LINE_ENDS = "\u2028\u2029"
SPACE = "\u1680"
"""A space that some fonts draw as a line; the others decompose into one."""

ALIKE_TOO = {
    **dict(zip("\u0432\u043a\u043c\u043d\u0442\u043f\u0438\u0437\u044c", "bkmhtnue" + "b", strict=True)),
    **dict(zip("\u03b5\u03ba\u03c4\u03b7\u03c9\u03c7\u03bc\u03b2\u03c5", "ektnwxubu", strict=True)),
    **dict(zip("\u0259\u0138\u04cf", "ekl", strict=True)),
    **dict(zip("\u0454\u0404\u04d9\u04d8", "eEeE", strict=True)),
    **dict(zip("\u2c81\u2c83\u2c89\u2c8d\u2c8f\u2c93\u2c95\u2c99\u2c9b", "abezhikmn", strict=True)),
    **dict(zip("\u2c9f\u2ca1\u2ca3\u2ca5\u2ca7\u2ca9\u2cad\u2cb1", "onpctyxw", strict=True)),
    **dict(zip("\u2c80\u2c82\u2c88\u2c8c\u2c8e\u2c94\u2c98\u2c9a", "ABEZHKMN", strict=True)),
    **dict(zip("\u2c9e\u2ca2\u2ca4\u2ca6\u2ca8\u2cac\u2cb0", "OPCTYXW", strict=True)),
}
"""Letters that look like ASCII ones in a word though no table of Unicode's says so of a single letter: of Cyrillic,
Greek, Latin and Coptic."""

CHARACTERS = 0x110000
"""In Unicode, unassigned ones included."""

UNKNOWN = 255
"""In place of a form's length. The longest form has 18 characters."""

AT_ONCE = 2048
"""New characters that are worked out before others may have a turn."""


def plain_form(character: str) -> str:
    """What one character shows, in ASCII where a letter looks like it; empty when it shows nothing. What ends a line
    is a line's end.

    Look-alikes of Unicode Technical Standard 39, of the character or of what is left of its compatibility decomposition
    (Unicode Standard Annex 15) without marks.
    """
    if (alike := _look_alike(character)) is not None:
        return alike
    if character in LINE_ENDS or character == SPACE:
        return " " if character == SPACE else "\n"
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
    """What of ASCII looks the same: a letter, also as a small capital or in a circle, or a number; None without it."""
    if character.isascii():
        return None
    name = unicodedata.name(character, "")
    if (number := _number(character, name)) is not None:
        return number
    if name.startswith(SMALL_CAPITAL) and len(letter := name.removeprefix(SMALL_CAPITAL)) == 1:
        return letter.lower()
    for names in (CHANGED_LETTER, ENCLOSED_LETTER):
        if (named := names.fullmatch(name)) is not None:
            return named[2].lower() if named[1] == "SMALL" or SMALL_CAPITAL in f"{name} " else named[2]
    if len(same := unicodedata.normalize("NFKD", character)) == 1 and same.isascii() and same.isalnum():
        return same
    return ALIKE_TOO.get(character) or _look_alikes().get(character)


def _number(character: str, name: str) -> str | None:
    if (digit := unicodedata.digit(character, None)) is not None:
        return str(digit)
    number = unicodedata.numeric(character, None)
    whole = number is not None and number.is_integer() and ENCLOSED_NUMBER.fullmatch(name) is not None
    return str(int(number)) if number is not None and whole else None


@cache
def strokes() -> tuple[Codes, Codes]:
    """Letters that may be an l as well as an i, in order, and the i that each is then."""
    alike = [one for one in {**_look_alikes(), **ALIKE_TOO} if len(one) == 1]
    found = (one for one in alike if plain_form(one) == "l" and not unicodedata.normalize("NFKD", one).isascii())
    ordered = sorted(set(found))
    return codes_of("".join(ordered)), codes_of("".join("I" if one.isupper() else "i" for one in ordered))


@cache
def _look_alikes() -> dict[str, str]:
    """Characters that look like an ASCII letter or digit. Loaded with the first text that needs it."""
    from confusable_homoglyphs import confusables  # type: ignore[import-untyped]

    found = {}
    for character, alike in confusables.confusables_data.items():
        others = [entry["c"] for entry in alike if len(entry["c"]) == 1]
        plain = (one for one in others if one.isascii() and one.isalnum())
        letter = None if character.isascii() else next(plain, None)
        if letter is None and _is_single_letter(character):
            letter = next(filter(None, map(_changed, others)), None)
        if letter is not None:
            found[character] = letter
    return found


def _is_single_letter(character: str) -> bool:
    return not character.isascii() and character.isalpha() and unicodedata.normalize("NFKD", character) == character


def _changed(alike: str) -> str | None:
    """The letter of a look-alike that only looks like one in ASCII itself: a small capital, or one of ``ALIKE_TOO``."""
    letter = unicodedata.name(alike, "").removeprefix(SMALL_CAPITAL)
    return letter.lower() if len(letter) == 1 else ALIKE_TOO.get(alike)
