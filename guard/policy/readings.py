"""A text as a person, or a model, may read it, for detectors that compare characters: without what hides a word in it.

Owns the ways in which one text is spelt as another: JSON's escapes, characters that show nothing, reversed runs, other
forms of a letter (compatibility forms, accents), and letters of other scripts that look the same. Every reading knows
where its characters stand in the text as it came. Never decides anything.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

PLAIN = re.compile(r"[\t\n\r\x20-\x5b\x5d-\x7e]*")
"""Texts that read in one way only: printable ASCII without a backslash."""

ESCAPE = re.compile(r"\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[\"\\/bfnrt])")
MAX_ESCAPING = 3
"""How many times over a text may be escaped: arguments of a tool are JSON that may hold JSON again."""

REVERSED = re.compile("\u202e([^\u202c\u202d\n]*)[\u202c\u202d]?")
"""From RIGHT-TO-LEFT OVERRIDE to what ends it, or to the line's end."""

TAGS = re.compile("[\U000e0020-\U000e007e]+")
"""Characters that show nothing and spell ASCII (Unicode, block Tags)."""

FILLERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Blank though they are letters or symbols; Unicode's categories do not tell."""

HIDDEN = frozenset(("Cc", "Cf", "Cn", "Co", "Me", "Mn"))
"""Categories of characters that show nothing by themselves; accents are among them."""

MAX_KNOWN_CHARACTERS = 1 << 15
"""Whose plain form is remembered; there are more than a million, and a client may send them all."""

WORDS_APART = "\t\n\r"
SMALL_CAPITAL = "LATIN LETTER SMALL CAPITAL "
CHANGED_LETTER = re.compile(r"LATIN (SMALL|CAPITAL) LETTER (?:LONG |DOTLESS |SCRIPT )?([A-Z])(?: WITH .+| BAR)?")
"""Names of letters with a hook, a stroke or a tail, which no decomposition takes off."""


@dataclass(frozen=True)
class Reading:
    """``starts`` and ``ends``: of each character, where in the text as it came it begins and ends."""

    text: str
    starts: array[int]
    ends: array[int]

    def in_original(self, span: tuple[int, int]) -> tuple[int, int]:
        """Characters [start, end) of the text as it came that a span of this reading was read from."""
        start, end = max(0, span[0]), min(len(self.text), span[1])
        if start >= end:
            return 0, 0
        return min(self.starts[start:end]), max(self.ends[start:end])


def other_readings(text: str) -> Iterator[Reading]:
    """The ways to read a text that differ from the text as it is; none for plain ASCII."""
    if PLAIN.fullmatch(text):
        return
    as_it_is = Reading(text, array("q", range(len(text))), array("q", range(1, len(text) + 1)))
    unescaped = as_it_is
    for _ in range(MAX_ESCAPING):
        if "\\" not in unescaped.text:
            break
        unescaped = _replaced(unescaped, ESCAPE, lambda found: str(json.loads(f'"{found[0]}"')))
    seen = {text}
    for shown in (unescaped, _reversed(unescaped), _replaced(unescaped, TAGS, _spelt)):
        reading = _plain(shown)
        if reading.text not in seen:
            seen.add(reading.text)
            yield reading


def _spelt(found: re.Match[str]) -> str:
    return "".join(chr(ord(one) - 0xE0000) for one in found[0])


def _replaced(reading: Reading, pattern: re.Pattern[str], written: Callable[[re.Match[str]], str]) -> Reading:
    """Every match replaced by what it stands for. Of as many characters each stands where its counterpart does."""
    parts: list[str] = []
    starts, ends = array("q"), array("q")
    at = 0
    for found in pattern.finditer(reading.text):
        begin, end = found.span()
        new = written(found)
        parts += (reading.text[at:begin], new)
        starts.extend(reading.starts[at:begin])
        ends.extend(reading.ends[at:begin])
        each = len(new) == end - begin
        starts.extend(reading.starts[begin:end] if each else reading.starts[begin : begin + 1] * len(new))
        ends.extend(reading.ends[begin:end] if each else reading.ends[end - 1 : end] * len(new))
        at = end
    if not parts:
        return reading
    starts.extend(reading.starts[at:])
    ends.extend(reading.ends[at:])
    return Reading("".join(parts) + reading.text[at:], starts, ends)


def _reversed(reading: Reading) -> Reading:
    """As it is shown: runs that are displayed from right to left by force are turned round."""
    order: list[int] = []
    at = 0
    for found in REVERSED.finditer(reading.text):
        order += range(at, found.start())
        order += reversed(range(*found.span(1)))
        at = found.end()
    if not order:
        return reading
    order += range(at, len(reading.text))
    return Reading(
        "".join(reading.text[i] for i in order),
        array("q", (reading.starts[i] for i in order)),
        array("q", (reading.ends[i] for i in order)),
    )


NOT_PLAIN = re.compile(r"[^\t\n\r\x20-\x7e]+")


def _plain(reading: Reading) -> Reading:
    parts: list[str] = []
    starts, ends = array("q"), array("q")
    at = 0
    for found in NOT_PLAIN.finditer(reading.text):
        begin, end = found.span()
        forms = [plain_form(one) for one in found[0]]
        parts += (reading.text[at:begin], *forms)
        starts.extend(reading.starts[at:begin])
        ends.extend(reading.ends[at:begin])
        for i, form in enumerate(forms, begin):
            starts.extend(reading.starts[i : i + 1] * len(form))
            ends.extend(reading.ends[i : i + 1] * len(form))
        at = end
    starts.extend(reading.starts[at:])
    ends.extend(reading.ends[at:])
    return Reading("".join(parts) + reading.text[at:], starts, ends)


@lru_cache(MAX_KNOWN_CHARACTERS)
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
