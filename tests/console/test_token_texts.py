"""Names of tokens become the text that they stand for, in each spelling that vocabularies use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.console.token_texts import token_texts


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (["<|im_start|>", "user", "Ċ", "Hello", "Ġworld"], ["<|im_start|>", "user", "\n", "Hello", " world"]),
        (["Ġna", "ÃŃ", "ve", "ĠðŁ", "ĺ", "Ģ"], [" na", "í", "ve", " ", "", "😀"]),
        (["<s>", "▁Hello", "▁world", "<0x0A>", "<0xC3>", "<0xA9>"], ["<s>", " Hello", " world", "\n", "", "é"]),
        (["plain", " text"], ["plain", " text"]),
        ([], []),
    ],
)
def test_the_texts_of_tokens_are_what_stands_there(names: list[str], texts: list[str]) -> None:
    assert token_texts(names) == texts


@given(st.lists(st.text(max_size=8), max_size=20))
def test_there_is_one_text_for_each_token_whatever_it_is_called(names: list[str]) -> None:
    assert len(token_texts(names)) == len(names)
