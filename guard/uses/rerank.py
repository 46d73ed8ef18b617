"""CoRe: documents in the order in which a model's own attention, from the query, finds them relevant.

Owns the prompt and the score. Documents come first and the query last, so that two prompts, one with the query and one
with "N/A" in its place, begin alike. Per token of a document, s is the attention that the chosen heads put on it,
as the mean over the query's tokens and the sum over heads; c = s - s of "N/A" takes out what the place in the prompt
attracts by itself. A document's score is the sum of c over its tokens, without those more than two standard deviations
below its mean. From Tran, Li, Florian, Sun, "Contrastive Retrieval Heads Improve Attention-Based Re-Ranking",
arXiv 2510.02219, which takes the calibration by "N/A" from Chen, Gutierrez, Su, "Attention in Large Language Models
Yields Efficient Zero-Shot Re-Rankers", arXiv 2410.02642. The attention is the model's own, scale, windows and soft
caps included; only heads that were chosen count (``reranker_heads``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from detectors.model_config import ModelConfig, Section, load_model_config
from guard.blank_text import mistake_in
from guard.mia.results import AttentionReadout, Readouts
from guard.mia.spec import AttentionCapture, Head, MiaSpec, SpanPositions
from guard.uses.asking import Ask, Messages
from guard.uses.parts import MAX_TEXTS, UnreadableError, need_complete, part_span, ranges_of, spans_of

Floats = npt.NDArray[np.float64]

INTRODUCTION = "Here are some paragraphs:"
INSTRUCTION = "Please find information that are relevant to the following query in the paragraphs above.\n\nQuery:"
"""The words that the published heads were chosen with."""

NO_QUERY = "N/A"
CAPTURE, QUERY = "attention", "query"
OUTLIER_DEVIATIONS = 2.0
MAX_DOCUMENTS = MAX_TEXTS

Index = Annotated[int, Field(ge=0, le=1023)]


class Params(Section):
    """``important_heads``: ``[layer, head]``, both counted from 0, as in the lists that others publish."""

    important_heads: Annotated[tuple[tuple[Index, Index], ...], Field(min_length=1, max_length=4096)]


class Measured(Section):
    """How the heads were chosen, and what that gave on queries that nothing was chosen on."""

    date: str
    command: str
    data: str
    """Data set with its version, and which of its rows."""
    method: str
    result: str
    """The file with the numbers, in ``bench/results``."""


class RerankerConfig(ModelConfig):
    """``model_configs/core_reranker/MODEL.json``."""

    params: Params
    measured: Measured | None = None

    @property
    def heads(self) -> tuple[Head, ...]:
        """With layers counted from 1, as the aperture does."""
        return tuple((layer + 1, head) for layer, head in self.params.important_heads)


@dataclass(frozen=True)
class Ranked:
    """One document's place. ``score``: the part of the heads' attention that the query draws to it beyond "N/A", on
    average over heads, from -1 to 1; higher is more relevant. It is no probability."""

    index: int
    score: float


def load_reranker(path: Path) -> RerankerConfig:
    """Raises ``ModelConfigError``."""
    return load_model_config(path, RerankerConfig)


def prompt(query: str, documents: Sequence[str]) -> Messages:
    """One user message in parts. Raises ``ValueError`` for texts that are blank or no characters."""
    for name, text in [("the query", query), *((f"document {i}", text) for i, text in enumerate(documents))]:
        if (mistake := mistake_in(text)) is not None:
            raise ValueError(f"{name} {mistake}")
    texts = [INTRODUCTION]
    for i, document in enumerate(documents, start=1):
        # The label is a part of its own: it keeps the tokens of one document apart from those of the next.
        texts += [f"\n[{i}] ", document]
    texts += [f"\n{INSTRUCTION} ", query]
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def document_parts(documents: int) -> list[int]:
    """Which parts of the message that ``prompt`` makes are the documents."""
    return [2 * i + 2 for i in range(documents)]


def query_part(documents: int) -> int:
    return 2 * documents + 2


def spec_for(heads: Sequence[Head], documents: int) -> MiaSpec:
    """What to read of the prompt of so many documents. Raises ``ValueError`` for too many."""
    capture = AttentionCapture(heads=tuple(heads), weights=True, positions=SpanPositions(span=QUERY))
    spans = {**spans_of(document_parts(documents)), QUERY: (part_span(query_part(documents)),)}
    return MiaSpec(spans=spans, attention={CAPTURE: capture})


def token_attention(readouts: Readouts, documents: int) -> list[Floats]:
    """Of each document ``[tokens]``: attention from the query's tokens, mean over these, sum over heads.

    Raises ``UnreadableError``.
    """
    item = readouts.items.get(CAPTURE)
    need_complete(item, CAPTURE)
    if not isinstance(item, AttentionReadout) or item.weights is None:
        raise UnreadableError("the readout has no weights of attention")
    summed = item.weights.astype(np.float64).sum(axis=0)
    return [summed[start:end] for start, end in ranges_of(readouts, documents)]


def document_scores(asked: Sequence[Floats], blank: Sequence[Floats]) -> Floats:
    """``[documents]``. asked, blank: ``token_attention`` with the query and with "N/A". Raises ``UnreadableError``."""
    if [len(one) for one in asked] != [len(one) for one in blank]:
        raise UnreadableError("the documents have other tokens with the query than with N/A")
    return np.array([_score(with_query - without) for with_query, without in zip(asked, blank, strict=True)])


def _score(tokens: Floats) -> float:
    return (
        float(tokens[tokens > tokens.mean() - OUTLIER_DEVIATIONS * tokens.std()].sum())
        if len(tokens) > 1
        else float(tokens.sum())
    )


def rank(scores: Floats, heads: int) -> list[Ranked]:
    """Best first; equal scores in the order in which the documents came."""
    return [Ranked(int(i), float(scores[i]) / heads) for i in np.argsort(-scores, kind="stable")]


def rerank(ask: Ask, heads: Sequence[Head], query: str, documents: Sequence[str]) -> list[Ranked]:
    """All documents, best first. Raises ``ValueError`` for texts that cannot be ranked, ``UnreadableError`` when the
    model's attention does not come back whole."""
    spec = spec_for(heads, len(documents))
    asked, blank = ask([(prompt(query, documents), spec), (prompt(NO_QUERY, documents), spec)])
    count = len(documents)
    scores = document_scores(token_attention(asked.prompt, count), token_attention(blank.prompt, count))
    return rank(scores, len(heads))
