"""What a sweep measures: languages, loops, patterns, and names of measures that there are none of."""

from __future__ import annotations

import math

import pytest

from guard.steering.coherence import distinct_share, perplexity
from guard.steering.languages import FUNCTION_WORDS, language_share
from guard.steering.measures import Answered, MeasureError, make_measure

TEXTS = {
    "en": "The river runs through the city, and there are bridges which you can walk over.",
    "fr": "La rivière traverse la ville, et il y a des ponts que vous pouvez passer à pied dans les deux sens.",
    "es": "El río pasa por la ciudad, y hay puentes donde usted puede caminar, pero los coches también.",
    "de": "Der Fluss geht durch die Stadt, und es gibt Brücken, die man auch mit dem Rad nehmen kann.",
    "it": "Il fiume attraversa la città, che è grande, e ci sono ponti dove anche gli altri possono passare.",
}


@pytest.mark.parametrize("language", TEXTS)
def test_a_text_is_mostly_in_its_own_language(language: str) -> None:
    shares = {one: language_share(TEXTS[language], one) for one in TEXTS}
    assert max(shares, key=shares.__getitem__) == language
    assert shares[language] > 0.8


def test_a_text_that_changes_its_language_is_partly_in_each() -> None:
    assert 0.2 < language_share(f"{TEXTS['en']} {TEXTS['fr']}", "fr") < 0.8


def test_too_few_words_are_in_no_language() -> None:
    assert language_share("Paris.", "fr") == language_share("", "fr") == language_share("le la 42", "fr") == 0.0


def test_no_word_is_in_two_languages() -> None:
    words = [word for known in FUNCTION_WORDS.values() for word in known]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("text", "share"),
    [("one two three four five", 1.0), ("go on go on go on go on", 2 / 6), ("two words", 0.0), ("", 0.0)],
)
def test_distinct_share_tells_text_from_loops(text: str, share: float) -> None:
    assert distinct_share(text) == pytest.approx(share)


def test_perplexity_is_that_of_a_fair_die() -> None:
    assert perplexity([math.log(1 / 6)] * 9) == pytest.approx(6)
    assert perplexity([]) == math.inf


def answered(*texts: str) -> Answered:
    return Answered((), (), texts, None)


def test_measures_of_text_are_means_over_the_answers() -> None:
    assert make_measure("language:fr").value(None, answered(TEXTS["fr"], TEXTS["de"])) == pytest.approx(0.5, abs=0.15)
    assert make_measure(r"pattern:(?m)^- ").value(None, answered("- a\n- b", "a - b", "c\n- d")) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "text", ["", "language", "language:", "language:xx", "pattern:(", "words:yes", "words:|no", "x:y"]
)
def test_a_measure_that_there_is_none_of_is_refused(text: str) -> None:
    with pytest.raises(MeasureError):
        make_measure(text)
