"""Chooses the head of schema linking: the one that ranks the columns of labelled questions best.

Owns the measure. Questions that it is chosen on say nothing about how well it does; keep others for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from guard.mia.spec import Head
from guard.uses.asking import Ask
from guard.uses.parts import naming
from guard.uses.schema_linking import Column, Floats, column_scores, prompt, spec_for


@dataclass(frozen=True)
class LabelledQuestion:
    """``needed``: indices of the columns that its query uses."""

    question: str
    needed: frozenset[int]


@dataclass(frozen=True)
class HeadQuality:
    head: Head
    average_precision: float
    """Mean over the questions."""


def read_scores(
    ask: Ask, heads: Sequence[Head], questions: Sequence[LabelledQuestion], columns: Sequence[Column]
) -> Floats:
    """``[questions, heads, columns]``, all asked at once. Raises ``UnreadableError``."""
    spec = spec_for(heads, len(columns))
    told = ask([(prompt(one.question, columns), spec) for one in questions])
    scores = []
    for i, one in enumerate(told):
        with naming(f"question {i}"):
            scores.append(column_scores(one.prompt, len(columns)))
    return np.stack(scores)


def head_qualities(scores: Floats, heads: Sequence[Head], questions: Sequence[LabelledQuestion]) -> list[HeadQuality]:
    """Best first. scores: of ``read_scores``."""
    qualities = [
        HeadQuality(
            head, float(np.mean([average_precision(scores[q, h], one.needed) for q, one in enumerate(questions)]))
        )
        for h, head in enumerate(heads)
    ]
    return sorted(qualities, key=lambda one: -one.average_precision)


def average_precision(scores: npt.NDArray[np.float64], needed: frozenset[int]) -> float:
    """Mean over the needed columns of the precision at their places. Raises ``ValueError`` when none is needed."""
    if not needed:
        raise ValueError("a labelled question needs at least one column")
    hits = np.isin(np.argsort(-scores, kind="stable"), list(needed))
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float(precision[hits].mean())
