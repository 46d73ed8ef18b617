"""Questions with the one answer that is right, and ten answers that BM25 finds: the data of the reranker's measurement.

Owns the split. Questions of one category are in one part, so that heads are not chosen on the topics that are measured.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import bm25s

from detectors.calibration.wheels import WHEELS, read_jsonl

WHEEL = "zaragoza-construction-faq"
MEMBER = "zaragoza_construction_faq/data/faq-en.jsonl"
CANDIDATES = 10


@dataclass(frozen=True)
class Case:
    """``candidates``: indices of answers, best first as BM25 has them. ``shown``: the same in the prompt's order, which
    says nothing about that. ``right``: index of the answer that belongs to the question; it may not be among them."""

    question: str
    candidates: tuple[int, ...]
    shown: tuple[int, ...]
    right: int

    def rank_of(self, order: tuple[int, ...]) -> int | None:
        """From 1; None where the right answer is not there."""
        return order.index(self.right) + 1 if self.right in order else None


@dataclass(frozen=True)
class Faq:
    answers: tuple[str, ...]
    calibration: tuple[Case, ...]
    held_out: tuple[Case, ...]


def faq(calibration: int, held_out: int) -> Faq:
    """So many questions of each part, drawn by a hash. Raises ``DataError`` when the wheel is not here."""
    rows = list(read_jsonl(WHEEL, MEMBER))
    answers = tuple(row["a"] for row in rows)
    index = bm25s.BM25()
    index.index(bm25s.tokenize(answers, stopwords="en", show_progress=False), show_progress=False)
    found, _ = index.retrieve(
        bm25s.tokenize([row["q"] for row in rows], stopwords="en", show_progress=False),
        k=CANDIDATES,
        show_progress=False,
    )
    parts: tuple[list[Case], list[Case]] = ([], [])
    for i in sorted(range(len(rows)), key=lambda i: _hash(rows[i]["q"])):
        candidates = tuple(int(one) for one in found[i])
        shown = tuple(sorted(candidates, key=lambda one: _hash(f"{rows[i]['q']}|{one}")))
        part = _hash(rows[i]["category"])[0] % 2
        parts[part].append(Case(rows[i]["q"], candidates, shown, i))
    # Heads can only be chosen on questions whose right answer is shown.
    shown_right = [case for case in parts[0] if case.right in case.candidates]
    return Faq(answers, tuple(shown_right[:calibration]), tuple(parts[1][:held_out]))


def source() -> str:
    return f"{WHEEL} {WHEELS[WHEEL].version} ({WHEELS[WHEEL].licence}), {MEMBER}"


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
