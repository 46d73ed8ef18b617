"""Windows of long texts: where they are cut, and one score from several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from detectors.base import Score
from detectors.windows import MORE, Windows, cut, passes_of, windowed

words = st.text("abcd", min_size=1, max_size=24).map(lambda word: f"{word} ")
prose = st.lists(st.sampled_from([". ", "\n", "! "]) | words, min_size=20, max_size=150).map("".join)
sizes = st.integers(40, 400).flatmap(
    lambda size: st.tuples(st.just(size), st.one_of(st.just(size // 2), st.integers(20, size // 2)))
)


@given(st.lists(prose, min_size=1, max_size=2), sizes)
def test_what_is_no_longer_than_half_a_stride_is_whole_in_a_window(texts: list[str], size: tuple[int, int]) -> None:
    characters, stride = size
    found = cut(texts, Windows(characters=characters, stride=stride, most=1024))
    if sum(map(len, texts)) <= characters:
        assert found.windows == ()
        return
    read = {texts[one.text][one.start : one.end] for one in found.windows}
    assert len(read) == len(found.windows)
    assert all(len(one) <= characters for one in read)
    whole = max(stride // 2, characters - 2 * stride)
    for text in texts:
        for at in range(len(text)):
            piece = text[at : at + whole]
            assert not piece.strip() or any(piece in one for one in read)


@given(prose.filter(lambda text: len(text) > 40), st.integers(40, 400), st.data())
def test_every_character_is_in_a_window_whatever_the_stride(text: str, characters: int, data: st.DataObject) -> None:
    windows = Windows(characters=characters, stride=data.draw(st.integers(20, characters)), most=1024)
    found = cut([text], windows).windows
    read = {i for one in found for i in range(one.start, one.end)}
    assert not found or all(i in read or not text[i].strip() for i in range(len(text)))


def test_what_is_longer_than_half_a_stride_may_be_whole_in_none() -> None:
    # Edges at 101, 301, 402 and 602: a window of 400 ends at 602 and begins at 301, as 101 is too far.
    text = " ".join(letter * count for letter, count in zip("abcde", (100, 199, 100, 199, 99), strict=True))
    found = cut([text], Windows())
    ends = [(one.start, one.end) for one in found.windows]
    assert ends[:4] == [(0, 101), (0, 301), (101, 402), (301, 602)]
    assert not any(start <= 300 and end >= 403 for start, end in ends)  # 103 characters


def test_windows_end_where_lines_and_sentences_do() -> None:
    text = "One sentence stands here. Another one follows it.\n" * 6
    found = cut([text], Windows(characters=100, stride=40))
    assert all(text[one.start : one.end].endswith((". ", "\n")) for one in found.windows)


def test_an_insertion_changes_the_windows_around_it_alone() -> None:
    lines = [f"This is line number {i} of the document.\n" for i in range(60)]
    windows = Windows(characters=200, stride=100)

    def read(text: str) -> set[str]:
        return {text[one.start : one.end] for one in cut([text], windows).windows}

    before, after = read("".join(lines)), read("".join([*lines[:30], "EVIL.\n", *lines[30:]]))
    assert len(after - before) <= 6


def test_more_windows_than_may_be_read_are_told() -> None:
    text = "".join(f"Sentence {i} stands here. " for i in range(100))
    found = cut([text], Windows(characters=80, stride=40, most=5))
    assert (len(found.windows), found.more) == (5, True)
    assert not cut([text], Windows(characters=80, stride=40, most=1000)).more


def test_a_stride_that_leaves_characters_out_is_refused() -> None:
    with pytest.raises(ValidationError, match="leaves characters out"):
        Windows(characters=100, stride=101)


def test_a_pass_has_the_instruction_and_one_window_of_what_came_from_outside() -> None:
    messages = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "earlier " * 30},
        {"role": "assistant", "content": "answered " * 30},
        {"role": "user", "content": [{"type": "text", "text": "asked " * 30}, {"type": "image_url"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "found " * 30},
    ]
    passes, more = passes_of(messages, Windows(characters=60, stride=30))
    assert not more
    assert {one[0]["content"] for one in passes} == {"You help."}
    assert [one[1]["role"] for one in passes] == ["user"] * len(passes)
    said = " ".join(one[1]["content"] for one in passes)
    assert ("asked" in said, "found" in said, "earlier" in said, "answered" in said) == (True, True, False, False)
    assert [len(one) for one in passes_of(messages[1:], Windows(characters=60, stride=30))[0]] == [1] * len(passes)


LOW, HIGH = Score("scored", 0.1), Score("scored", 0.9)
LATE = Score("unavailable", reason="late", timed_out=True)
BROKEN = Score("unavailable", reason="broken")


@pytest.mark.parametrize(
    ("whole", "windows", "value", "floor", "timed_out"),
    [
        (LOW, [LOW, HIGH], 0.9, False, False),
        (HIGH, [LOW], 0.9, False, False),
        (LOW, [], 0.1, False, False),
        (LOW, [LATE, LOW], 0.1, True, True),
        (LOW, [LATE, BROKEN], 0.1, True, False),
        (BROKEN, [HIGH], 0.9, True, False),
        (LATE, [BROKEN], None, False, True),
    ],
)
def test_what_is_missing_leaves_no_low_score_clean(
    whole: Score, windows: list[Score], value: float | None, floor: bool, timed_out: bool
) -> None:
    score = windowed(whole, windows)
    assert (score.value, score.floor, score.timed_out) == (value, floor, timed_out)
    assert bool(score.reason) is (floor or value is None)
    assert windowed(whole, windows, MORE).floor is (value is not None)
