"""The text baseline: TF-IDF with logistic regression, what reading the text alone gives, as a detector like others.

Owns the formula of scikit-learn's ``TfidfVectorizer``, computed here without it: n-grams of words or of characters
inside words, ``1 + ln(count)`` times the inverse document frequency, scaled to length 1, then
``sigmoid(weight . x + bias)``. So a long text scores as most of it does; ``windows``: the value is the highest of the
text and of its stretches. Vocabulary as a JSON list, ``idf`` and ``weight`` beside it in a safetensors file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import log, sqrt
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from detectors.base import Score
from detectors.deadline import check_deadline
from detectors.linear import WeightsFile, check_shapes, load_tensors, sigmoid
from detectors.model_config import ModelConfig, ModelConfigError, Section, load_model_config
from detectors.windows import check_stride
from guard.mia.results import FloatArray

IDF, WEIGHT, BIAS = "idf", "weight", "bias"

WORD = re.compile(r"(?u)\b\w\w+\b")
"""What scikit-learn takes for a word unless told otherwise."""

NGRAMS_AT_ONCE = 16384
"""Counted before it is asked whether the score is still wanted."""

Length = Annotated[int, Field(ge=1, le=8)]


class TextWindows(Section):
    """``characters``: of a stretch; ``stride``: from the beginning of one to that of the next."""

    characters: Annotated[int, Field(ge=20, le=100_000)] = 200
    stride: Annotated[int, Field(ge=10, le=100_000)] = 100

    @model_validator(mode="after")
    def _every_character_is_in_one(self) -> Self:
        check_stride(self.stride, self.characters)
        return self


class Params(Section):
    analyzer: Literal["words", "characters"]
    """``words``: scikit-learn's ``word``; ``characters``: its ``char_wb``, with a space at both ends of each word."""
    ngrams: tuple[Length, Length]
    """Shortest and longest."""
    terms: Annotated[int, Field(ge=1, le=1_000_000)]
    vocabulary: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+\.json$")]
    """Name of a file in this file's folder: a list of ``terms`` n-grams, in the order of the weights."""
    vocabulary_sha256: str
    weights: WeightsFile
    """The same of ``idf`` and ``weight`` [terms] and ``bias`` [1], float32."""
    weights_sha256: str
    windows: TextWindows | None = None
    """Score stretches of a long text too, so that nothing around an attack dilutes it. Thresholds measured without are
    not those of a file with them."""

    @model_validator(mode="after")
    def _shortest_first(self) -> Self:
        if self.ngrams[0] > self.ngrams[1]:
            raise ValueError("ngrams are the shortest and the longest, in this order")
        return self


class TextBaselineConfig(ModelConfig):
    params: Params


class TextBaseline:
    kind = "text_baseline"

    def __init__(
        self, config: TextBaselineConfig, vocabulary: Sequence[str], idf: FloatArray, weight: FloatArray, bias: float
    ) -> None:
        self.config = config
        self.thresholds: Mapping[str, float] = config.threshold_values()
        self.terms = {
            term: (float(i), float(w)) for term, i, w in zip(vocabulary, idf.tolist(), weight.tolist(), strict=True)
        }
        self.bias = bias
        self.windows = config.params.windows

    @classmethod
    def load(cls, path: Path) -> TextBaseline:
        config = load_model_config(path, TextBaselineConfig)
        params, file = config.params, path.parent / config.params.weights
        tensors = load_tensors(file, params.weights_sha256)
        check_shapes(file, tensors, {IDF: (params.terms,), WEIGHT: (params.terms,), BIAS: (1,)})
        vocabulary = _vocabulary(path.parent / params.vocabulary, params)
        return cls(config, vocabulary, tensors[IDF], tensors[WEIGHT], float(tensors[BIAS][0]))

    def score_text(self, text: str) -> Score:
        return Score("scored", max(self._value(text), *(self._value(one) for one in self._stretches(text)), 0.0))

    def _stretches(self, text: str) -> Iterator[str]:
        """Of a text longer than one; the last is as long as the others."""
        if self.windows is None or len(text) <= self.windows.characters:
            return
        last = len(text) - self.windows.characters
        for begin in (*range(0, last, self.windows.stride), last):
            yield text[begin : begin + self.windows.characters]

    def _value(self, text: str) -> float:
        counts: Counter[str] = Counter()
        ngrams = self._ngrams(text.lower())
        while some := list(islice(ngrams, NGRAMS_AT_ONCE)):
            check_deadline()
            counts.update(term for term in some if term in self.terms)
        total, squares = 0.0, 0.0
        for term, count in counts.items():
            idf, weight = self.terms[term]
            frequency = (1.0 + log(count)) * idf
            total += frequency * weight
            squares += frequency * frequency
        return float(sigmoid(self.bias + (total / sqrt(squares) if squares else 0.0)))

    def _ngrams(self, text: str) -> Iterator[str]:
        shortest, longest = self.config.params.ngrams
        if self.config.params.analyzer == "words":
            words = WORD.findall(text)
            for n in range(shortest, longest + 1):
                for i in range(len(words) - n + 1):
                    yield " ".join(words[i : i + n])
            return
        for word in text.split():
            padded = f" {word} "
            for n in range(shortest, longest + 1):
                if n >= len(padded):
                    # A word that is shorter counts once, whatever is longer than it.
                    yield padded
                    break
                for i in range(len(padded) - n + 1):
                    yield padded[i : i + n]


def _vocabulary(path: Path, params: Params) -> list[str]:
    try:
        raw = path.read_bytes()
        terms = TypeAdapter(list[str]).validate_python(json.loads(raw), strict=True)
    except (OSError, ValueError, ValidationError) as error:
        raise ModelConfigError(f"{path}: cannot be read as a list of terms") from error
    if (found := hashlib.sha256(raw).hexdigest()) != params.vocabulary_sha256:
        raise ModelConfigError(
            f"{path}: SHA-256 is {found}, the JSON beside it was written for {params.vocabulary_sha256}; "
            "take both from the same calibration"
        )
    if len(set(terms)) != params.terms or len(terms) != params.terms:
        raise ModelConfigError(f"{path}: must hold {params.terms} different terms, not {len(terms)}")
    return terms
