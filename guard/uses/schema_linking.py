"""AttnLink-U: which columns of a database a question needs, from one attention head of a model that reads the schema.

Owns the prompt and the choice. The model reads every column as ``column@table``, then the question, and is asked to
copy the columns that are needed; nothing is generated. A column's score is the mean attention that the last token of
the prompt puts on the column's tokens with the one head. Scores become probabilities, p = softmax(log(score + 1e-8) /
temperature), and the shortest run of the likeliest columns whose probabilities reach ``top_p`` is chosen. After Song
et al., "AttnLink", arXiv 2608.00693, as MIA's documents describe it. Which head is measured (``linking_head``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from guard.blank_text import mistake_in
from guard.mia.results import AttentionReadout, Readouts
from guard.mia.spec import AttentionCapture, Head, MiaSpec
from guard.uses.asking import Ask, Messages
from guard.uses.parts import UnreadableError, need_complete, ranges_of, spans_of

Floats = npt.NDArray[np.float64]

INTRODUCTION = "Columns of a database, each as column@table:"
INSTRUCTION = "Copy the columns, as column@table, that a query for this question needs.\nQuestion: "
CAPTURE = "link"
EPSILON = 1e-8
LEAST_TEMPERATURE = 1e-6
"""Where the likeliest column has all; a logit divided by much less is no number."""
TEMPERATURE, TOP_P = 1.0, 0.8


@dataclass(frozen=True)
class Column:
    name: str
    table: str

    @property
    def text(self) -> str:
        return f"{self.name}@{self.table}"


@dataclass(frozen=True)
class Linked:
    """``scores``, ``probabilities``: by column, in the order given. ``ranking``: indices, likeliest first.
    ``selected``: the beginning of it that was chosen."""

    scores: Floats
    probabilities: Floats
    ranking: tuple[int, ...]
    selected: tuple[int, ...]


def prompt(question: str, columns: Sequence[Column]) -> Messages:
    """One user message in parts. Raises ``ValueError`` for texts that are blank or no characters, and for columns that
    are there twice or are not one line."""
    if (mistake := mistake_in(question)) is not None:
        raise ValueError(f"the question {mistake}")
    texts, seen = [INTRODUCTION], set[str]()
    for i, column in enumerate(columns):
        for what, name in (("name", column.name), ("table", column.table)):
            if (mistake := mistake_in(name)) is not None:
                raise ValueError(f"the {what} of column {i} {mistake}")
            if len(name.splitlines()) > 1:
                # The next line would read as another column.
                raise ValueError(f"the {what} of column {i} has more than one line")
        if column.text in seen:
            raise ValueError(f"column {i} is there twice: {column.text}")
        seen.add(column.text)
        texts += ["\n- ", column.text]
    texts.append(f"\n{INSTRUCTION}{question}")
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def spec_for(heads: Sequence[Head], columns: int) -> MiaSpec:
    """What to read: the last prompt token's attention. One head for linking, several to choose one from."""
    spans = spans_of([2 * i + 2 for i in range(columns)])
    return MiaSpec(spans=spans, attention={CAPTURE: AttentionCapture(heads=tuple(heads), weights=True)})


def column_scores(readouts: Readouts, columns: int) -> Floats:
    """``[heads, columns]``: mean attention on each column's tokens. Raises ``UnreadableError``."""
    item = readouts.items.get(CAPTURE)
    need_complete(item, CAPTURE)
    if not isinstance(item, AttentionReadout) or item.weights is None:
        raise UnreadableError("the readout has no weights of attention")
    weights = item.weights.astype(np.float64)
    return np.stack([weights[:, start:end].mean(axis=1) for start, end in ranges_of(readouts, columns)], axis=1)


def choose(scores: Floats, temperature: float = TEMPERATURE, top_p: float = TOP_P) -> Linked:
    """scores: ``[columns]``. At least one column is chosen; all with ``top_p`` 1. Raises ``ValueError``."""
    if not LEAST_TEMPERATURE <= temperature < np.inf:
        raise ValueError(f"temperature is a number from {LEAST_TEMPERATURE:g} on, not {temperature:g}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is above 0 and at most 1, not {top_p:g}")
    logits = np.log(scores + EPSILON) / temperature
    weights = np.exp(logits - logits.max())
    probabilities = weights / weights.sum()
    ranking = np.argsort(-probabilities, kind="stable")
    reached = np.flatnonzero(np.cumsum(probabilities[ranking]) >= top_p)
    # A sum of all may end a rounding below 1.
    count = int(reached[0]) + 1 if top_p < 1 and len(reached) else len(ranking)
    order = tuple(int(i) for i in ranking)
    return Linked(scores, probabilities, order, order[:count])


def link(
    ask: Ask,
    head: Head,
    question: str,
    columns: Sequence[Column],
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
) -> Linked:
    """Raises ``ValueError`` for what cannot be linked, ``UnreadableError`` when the attention does not come back."""
    (told,) = ask([(prompt(question, columns), spec_for([head], len(columns)))])
    return choose(column_scores(told.prompt, len(columns))[0], temperature, top_p)
