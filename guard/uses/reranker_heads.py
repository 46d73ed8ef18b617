"""Chooses the heads of the reranker: those that tell a relevant document from ones that only look alike.

Owns the contrastive score of Tran et al., arXiv 2510.02219. Each query comes with one relevant document and hard
negatives in one prompt. For one head, m is the attention mass on a document: its sum over the document's tokens, as
the mean over the query's. The head's score for the query is the share of the relevant document in
softmax(m / temperature) over all of them; its score is the mean over queries. The best few, eight in the paper, are the
heads to use. They are chosen without "N/A", as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from guard.mia.results import AttentionReadout, Readouts
from guard.mia.spec import AttentionCapture, Head, MiaSpec, SpanPositions
from guard.uses.asking import Ask
from guard.uses.parts import UnreadableError, naming, need_complete, part_span
from guard.uses.rerank import CAPTURE, QUERY, Floats, document_parts, prompt, query_part

TEMPERATURE = 0.001
"""The paper's for models of the Mistral and Granite families; 0.1 for Llama and Phi."""

TOP_HEADS = 8
MAX_CANDIDATES = 15
"""Documents of one query: each is a span of its own, since attention masses alone leave the engine here."""


@dataclass(frozen=True)
class LabelledQuery:
    query: str
    documents: tuple[str, ...]
    relevant: int
    """Index of the relevant document; all others are negatives."""


def document_mass(ask: Ask, heads: Sequence[Head], queries: Sequence[LabelledQuery]) -> list[Floats]:
    """For each query ``[heads, documents]``. Raises ``ValueError`` and ``UnreadableError``."""
    for one in queries:
        if not 2 <= len(one.documents) <= MAX_CANDIDATES or not 0 <= one.relevant < len(one.documents):
            raise ValueError(f"a labelled query has 2 to {MAX_CANDIDATES} documents, one of them relevant")
    told = ask([(prompt(one.query, one.documents), _spec(heads, len(one.documents))) for one in queries])
    masses = []
    for i, (answer, query) in enumerate(zip(told, queries, strict=True)):
        with naming(f"query {i}"):
            masses.append(_mass(answer.prompt, len(query.documents)))
    return masses


def _spec(heads: Sequence[Head], documents: int) -> MiaSpec:
    spans = {f"document.{i}": (part_span(part),) for i, part in enumerate(document_parts(documents))}
    capture = AttentionCapture(heads=tuple(heads), spans=tuple(spans), positions=SpanPositions(span=QUERY))
    return MiaSpec(spans={**spans, QUERY: (part_span(query_part(documents)),)}, attention={CAPTURE: capture})


def _mass(readouts: Readouts, documents: int) -> Floats:
    item = readouts.items.get(CAPTURE)
    need_complete(item, CAPTURE)
    if not isinstance(item, AttentionReadout):
        raise UnreadableError("the readout is no attention")
    return np.stack([item.mass[f"document.{i}"].astype(np.float64) for i in range(documents)], axis=1)


def contrastive_scores(mass: Sequence[Floats], relevant: Sequence[int], temperature: float = TEMPERATURE) -> Floats:
    """``[heads]``, in 0 to 1. mass: for each query ``[heads, documents]``."""
    shares = []
    for one, index in zip(mass, relevant, strict=True):
        logits = one / temperature
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares.append(weights[:, index] / weights.sum(axis=1))
    return np.asarray(np.mean(shares, axis=0))


def best_heads(scores: Floats, heads: Sequence[Head], count: int = TOP_HEADS) -> list[Head]:
    """Best first."""
    return [heads[i] for i in np.argsort(-scores, kind="stable")[:count]]
