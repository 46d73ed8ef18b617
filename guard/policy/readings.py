"""A text as a person, or a model, may read it, for detectors that compare characters: without what hides a word in it.

Owns the ways in which one text is spelt as another: JSON's escapes, characters that show nothing, reversed runs, and
what each character looks like (``plain_forms``). Every reading knows where its characters stand in the text as it came.
Takes time in proportion to the text, whatever is in it: all characters at once, and none by itself. Never decides
anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from string import hexdigits

import numpy as np
import numpy.typing as npt

from detectors.deadline import check_deadline
from guard.policy.plain_forms import Codes, Places, PlainForms, codes_of, strokes, text_of

PLAIN = re.compile(r"[\t\n\r\x20-\x5b\x5d-\x7e]*")
"""Texts that read in one way only: printable ASCII without a backslash."""

MAX_ESCAPING = 3
"""How many times over a text may be escaped: arguments of a tool are JSON that may hold JSON again."""

BACKSLASH, LETTER_U = ord("\\"), ord("u")
ESCAPES = {ord(one): ord(meant) for one, meant in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True)}
"""Of JSON's short escapes: the character behind the backslash, and what is meant."""

HEXADECIMAL = np.array([int(chr(i), 16) if chr(i) in hexdigits else 16 for i in range(128)], np.uint32)
"""By character, what a digit says; 16: it is none."""

SHORT, LONG = 2, 6
"""Characters of an escape: ``\\n``, and ``\\u000a``."""

RIGHT_TO_LEFT = 0x202E
"""RIGHT-TO-LEFT OVERRIDE: what follows is shown reversed, to one of ``ENDING`` or to the line's end."""

ENDING = (0x202C, 0x202D)
LINE_ENDS = (ord("\n"), 0x2028, 0x2029)

TAGS = (0xE0020, 0xE007E)
TAGS_ABOVE_ASCII = 0xE0000
"""Characters that show nothing and spell ASCII (Unicode, block Tags): the first and the last."""

Indices = npt.NDArray[np.intp]

_FORMS = PlainForms()


@dataclass(frozen=True)
class Reading:
    """``starts`` and ``ends``: of each character, where in the text as it came it begins and ends."""

    text: str
    starts: Places
    ends: Places

    def in_original(self, span: tuple[int, int]) -> tuple[int, int]:
        """Characters [start, end) of the text as it came that a span of this reading was read from."""
        start, end = max(0, span[0]), min(len(self.text), span[1])
        if start >= end:
            return 0, 0
        return int(self.starts[start:end].min()), int(self.ends[start:end].max())


@dataclass(frozen=True)
class _Spelt:
    """A reading in numbers."""

    codes: Codes
    starts: Places
    ends: Places

    def at(self, order: Indices | Places | npt.NDArray[np.bool_]) -> _Spelt:
        return _Spelt(self.codes[order], self.starts[order], self.ends[order])


def other_readings(text: str) -> Iterator[Reading]:
    """The ways to read a text that differ from the text as it is; none for plain ASCII. Raises ``TooLateError``."""
    if PLAIN.fullmatch(text):
        return
    codes = codes_of(text)
    places = np.arange(len(codes) + 1, dtype=np.int32)
    as_it_is = _Spelt(codes, places[:-1], places[1:])
    seen, unescaped = {text}, _unescaped(as_it_is)
    for way in WAYS:
        shown = way(unescaped)
        if shown is unescaped and way is not WAYS[0]:
            continue
        reading = _plain(shown)
        if reading.text not in seen:
            seen.add(reading.text)
            yield reading


def _plain(shown: _Spelt) -> Reading:
    check_deadline()
    codes, of = _FORMS.of(shown.codes)
    check_deadline()
    return Reading(text_of(codes), shown.starts[of], shown.ends[of])


def _with_other_letters(spelt: _Spelt) -> _Spelt:
    """One stroke is an l in one word and an i in another: here all are i."""
    of, letters = strokes()
    found = np.isin(spelt.codes, of)
    if not found.any():
        return spelt
    codes = spelt.codes.copy()
    codes[found] = letters[np.searchsorted(of, codes[found])]
    return _Spelt(codes, spelt.starts, spelt.ends)


def _untagged(spelt: _Spelt) -> _Spelt:
    codes = spelt.codes
    tags = (codes >= TAGS[0]) & (codes <= TAGS[1])
    return _Spelt(np.where(tags, codes - TAGS_ABOVE_ASCII, codes), spelt.starts, spelt.ends) if tags.any() else spelt


def _unescaped(spelt: _Spelt) -> _Spelt:
    for _ in range(MAX_ESCAPING):
        check_deadline()
        fewer = _once_unescaped(spelt)
        if fewer is spelt:
            break
        spelt = fewer
    return spelt


def _once_unescaped(spelt: _Spelt) -> _Spelt:
    """Every escape replaced by the one character that it stands for. The same object: there is none."""
    codes, count = spelt.codes, len(spelt.codes)
    backslashes = np.flatnonzero(codes == BACKSLASH)
    if not len(backslashes):
        return spelt
    # Of a run of backslashes every second is escaped by the one before it.
    nth = np.arange(len(backslashes))
    begins = np.diff(backslashes, prepend=-2) != 1
    first = np.maximum.accumulate(np.where(begins, nth, 0))
    begin = backslashes[(nth - first) % 2 == 0]
    behind = np.append(codes, np.zeros(2 * LONG, codes.dtype))
    meant, length = behind[begin], np.zeros(len(begin), np.intp)
    for character, stands_for in ESCAPES.items():
        short = behind[begin + 1] == character
        meant[short], length[short] = stands_for, SHORT
    value, is_long = _hexadecimal(behind, begin)
    meant[is_long], length[is_long] = value[is_long], LONG
    # Two halves of one character, in escapes that follow one another.
    high = is_long[:-1] & is_long[1:] & (begin[1:] - begin[:-1] == LONG) & (value[:-1] >> 10 == 0xD800 >> 10)
    pairs = np.flatnonzero(high & (value[1:] >> 10 == 0xDC00 >> 10))
    meant[pairs] = 0x10000 + ((value[pairs] - 0xD800) << 10) + (value[pairs + 1] - 0xDC00)
    length[pairs], length[pairs + 1] = 2 * LONG, 0
    found = length > 0
    begin, meant, length = begin[found], meant[found], length[found]
    if not len(begin):
        return spelt
    inside = np.zeros(count + 1, np.int8)
    inside[begin + 1] += 1
    inside[begin + length] -= 1
    kept = np.cumsum(inside[:count], dtype=np.int8) == 0
    written, ends = codes.copy(), spelt.ends.copy()
    written[begin], ends[begin] = meant, spelt.ends[begin + length - 1]
    return _Spelt(written, spelt.starts, ends).at(kept)


def _hexadecimal(behind: Codes, begin: Indices) -> tuple[Codes, npt.NDArray[np.bool_]]:
    """Of each backslash, what ``uXXXX`` behind it says, and whether it is that."""
    value, is_long = np.zeros(len(begin), np.uint32), behind[begin + 1] == LETTER_U
    for place in range(2, LONG):
        digit = HEXADECIMAL[np.minimum(behind[begin + place], len(HEXADECIMAL) - 1)]
        is_long &= digit < 16
        value = (value << 4) + digit
    return value, is_long


def _turned_round(spelt: _Spelt) -> _Spelt:
    """As it is shown: runs that are displayed from right to left by force are turned round. The same object: there are
    none."""
    codes, count = spelt.codes, len(spelt.codes)
    opening = codes == RIGHT_TO_LEFT
    if not opening.any():
        return spelt
    ending = np.isin(codes, ENDING)
    events = np.flatnonzero(opening | ending | np.isin(codes, LINE_ENDS))
    opens = opening[events]
    # One that follows another, without an end between them, is inside the run that the first has begun.
    begins = opens & ~np.append(False, opens[:-1])
    begin = events[begins]
    ends = np.append(events[~opens], count)
    end = ends[np.searchsorted(ends, begin)]
    order = np.arange(count, dtype=np.int32)
    lengths = end - begin - 1
    run = np.repeat(np.arange(len(begin)), lengths)
    within = np.arange(len(run)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    order[begin[run] + 1 + within] = end[run] - 1 - within
    shown = np.ones(count, np.bool_)
    shown[begin] = False
    ended = end[end < count]
    shown[ended[ending[ended]]] = False
    return spelt.at(order[shown])


WAYS: tuple[Callable[[_Spelt], _Spelt], ...] = (lambda spelt: spelt, _turned_round, _untagged, _with_other_letters)
"""Of showing a text whose escapes are read. Each gives the same object back where it changes nothing."""
