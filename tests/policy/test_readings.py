"""What a text is read as, and where each of its characters stands in the text as it came."""

from __future__ import annotations

import json
import re
import string
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.deadline import Deadline, TooLateError, until
from guard.policy.plain_forms import plain_form
from guard.policy.readings import other_readings

unhurried = settings(deadline=None, max_examples=150)
"""Other processes may take the machine from a test."""

HIDING = st.sampled_from("\u200b\u200d\u00ad\u2060\ufeff\u0301\u0336\ufe0f\x00\u3164\u2066")
LOOKS_LIKE = {
    "a": "\u0430",
    "e": "\u0435\uff45\u00e9",
    "o": "\u043e\u03bf",
    "c": "\u0441",
    "p": "\u0440",
    "s": "\u0455",
}


@given(st.text(string.printable.replace("\\", "").replace("\x0b", "").replace("\x0c", "")))
@unhurried
def test_plain_ascii_reads_in_one_way_only(text: str) -> None:
    assert not list(other_readings(text))


@given(st.text(), st.integers(0, 30), st.integers(0, 30))
@unhurried
def test_every_place_of_a_reading_is_a_place_of_the_text(text: str, start: int, length: int) -> None:
    for reading in other_readings(text):
        assert reading.text != text
        assert len(reading.text) == len(reading.starts) == len(reading.ends)
        begin, end = reading.in_original((start, start + length))
        assert 0 <= begin <= end <= len(text)


@given(st.text("abcdeops", min_size=1, max_size=12), st.data())
@unhurried
def test_a_disguised_word_is_read_and_found_where_it_stands(word: str, data: st.DataObject) -> None:
    spelt = "".join(
        data.draw(st.sampled_from([one, *LOOKS_LIKE.get(one, "")])) + data.draw(st.just("") | HIDING) for one in word
    )
    before, after = "\u044f\u2026 ", " \u65e5"
    found = [one for one in other_readings(before + spelt + after) if word in one.text]
    assert found
    at = found[0].text.index(word, 3)
    begin, end = found[0].in_original((at, at + len(word)))
    assert begin == len(before)
    assert (before + spelt + after)[begin:end].rstrip("".join(chr(i) for i in range(0x300, 0x370))) in spelt


@pytest.mark.parametrize(
    ("spelt", "read"),
    [
        ("s\u0454cr\u0454t", "secret"),
        ("S\u0404CR\u0404T", "SECRET"),
        ("secre\u2ca7", "secret"),
        ("\ua785\ua785c\ua783e\ua787", "sscret"),
        ("\u1d1ase\u1d19", "rser"),
        ("\ua75b\ua763\ua7bb\ua7c1", "rzao"),
        ("\uab7a\uab7c\uabb2\uab72", "aept"),
        ("\u2ca5\u2c89c\u2ca3\u2c89\u2ca7", "cecpet"),
        ("\u054decret", "Uecret"),
    ],
)
def test_letters_of_other_hands_and_scripts_are_read_as_what_they_look_like(spelt: str, read: str) -> None:
    assert read in [one.text for one in other_readings(spelt)]


@pytest.mark.parametrize("text", ["\u30c7\u30fc\u30bf", "\u3316", "\u10a0", "\u2d3a", "\u0b89\u0ba4"])
def test_what_is_no_letter_alike_stays_what_it_is(text: str) -> None:
    """Of Japanese, Tamil, Georgian or Tifinagh no ASCII is made."""
    assert not any(plain_form(one).isascii() for one in text)


@given(st.text(max_size=40), st.integers(1, 3))
@unhurried
def test_what_json_escapes_is_read_as_it_was(text: str, times: int) -> None:
    escaped = text
    for _ in range(times):
        escaped = json.dumps(escaped)[1:-1]
    if "\\" in escaped and "\\" not in text:
        wanted = "".join(plain_form(one) for one in text)
        assert wanted in [escaped, *(one.text for one in other_readings(escaped))]


@pytest.mark.parametrize(
    ("shown", "plain"),
    [
        *(("\u65e5", "\u65e5"), ("\ufb01", "fi"), ("\u0416", "\u0416"), ("\u00b2", "2"), ("\u200b", "")),
        *(("\u00a0", " "), ("\u1680", " "), ("\u2028", "\n"), ("\u2029", "\n"), ("\u00bd", "1\u20442")),
    ],
)
def test_what_looks_like_no_ascii_letter_stays(shown: str, plain: str) -> None:
    assert plain_form(shown) == plain


EIGHT_MEGABYTES = {
    "nothing between letters": "s\u200b" * 2_000_000,
    "nothing at all": "\u200b" * 2_600_000,
    "escapes": "\\u200b" * 1_300_000,
    "backslashes": "\\" * 8_000_000,
    "reversed runs": "\u202ea\u202c" * 1_100_000,
    "tags": "\U000e0041" * 2_000_000,
    "every character": "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)])),
}


@pytest.mark.parametrize("text", list(EIGHT_MEGABYTES.values()), ids=list(EIGHT_MEGABYTES))
def test_the_longest_texts_are_read_quickly(text: str) -> None:
    began_s = time.thread_time()
    assert list(other_readings(text))
    assert time.thread_time() - began_s < 5


def test_a_reading_gives_up_when_nobody_waits_for_it() -> None:
    with until(Deadline(time.monotonic() - 1)), pytest.raises(TooLateError):
        list(other_readings("s\u200becret"))


def named(pattern: str) -> dict[str, str]:
    """Characters whose Unicode name is of this kind, with what its last group says."""
    found = {}
    for one in map(chr, range(0x80, 0x110000)):
        if (name := re.fullmatch(pattern, unicodedata.name(one, ""))) is not None:
            found[one] = name[1]
    return found


def test_every_letter_in_a_circle_a_square_or_brackets_is_the_letter() -> None:
    drawn = (
        r".*(?:CIRCLED|SQUARED|PARENTHESIZED|BRACKETED|INDICATOR SYMBOL)(?: LATIN)?(?: SMALL| CAPITAL)? LETTER ([A-Z])"
    )
    letters = named(drawn)
    assert len(letters) > 180
    assert {one: plain_form(one).upper() for one in letters} == letters


def test_numerals_that_are_words_or_letters_stay_these() -> None:
    assert [plain_form(one) for one in "四零Ⅳⅻ"] == ["四", "零", "IV", "xii"]
    assert [plain_form(one) for one in "٤④"] == ["4", "4"]


def test_every_digit_however_it_is_drawn_is_the_digit() -> None:
    digits = {one: str(digit) for one in map(chr, range(0x80, 0x110000))
              if (digit := unicodedata.digit(one, None)) is not None}  # fmt: skip
    assert len(digits) > 700
    assert {one: plain_form(one) for one in digits} == digits


def test_nothing_that_unicode_has_ignored_by_default_is_in_a_reading() -> None:
    ranges = (
        *((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F)),
        *((0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF)),
        *((0xFFA0, 0xFFA0), (0xFFF0, 0xFFFB), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
    )
    assert not [hex(i) for first, last in ranges for i in range(first, last + 1) if plain_form(chr(i))]


@pytest.mark.parametrize("stroke", ["\u04cf", "\u04c0", "\u0399", "\u0406"])
def test_a_stroke_is_read_as_an_l_and_as_an_i(stroke: str) -> None:
    assert any("delete" in one.text.lower() for one in other_readings(f"de{stroke}ete"))
    assert any("ignore" in one.text.lower() for one in other_readings(f"{stroke}gnore"))
