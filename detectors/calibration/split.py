"""Train, validation and held-out rows that share no idea: whole groups go to one split.

Owns grouping (declared families joined with near-duplicates) and the assignment, which depends on the seed alone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]

Split = Literal["train", "validation", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
SHARES: Mapping[Split, float] = {"train": 0.4, "validation": 0.3, "held_out": 0.3}

NEAR_DUPLICATE = 0.6
"""Cosine similarity of character 3- to 5-grams from which two texts count as one idea."""
COMPARED_CHARACTERS = 1000
"""How much of each text is compared: what begins alike counts as alike."""


def merge_near_duplicates(texts: Sequence[str], families: Sequence[str]) -> list[str]:
    """One group name per text: families, joined wherever two of their texts are nearly the same."""
    return merge_beside(texts, families, ())[0]


def merge_beside(
    texts: Sequence[str], families: Sequence[str], others: Sequence[str]
) -> tuple[list[str], list[list[int]]]:
    """Group names as ``merge_near_duplicates`` gives them, and which of ``others`` each text is nearly the same as."""
    parent = {family: family for family in families}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    every = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True).fit_transform(
        [text[:COMPARED_CHARACTERS] for text in (*texts, *others)]
    )
    vectors = every[: len(texts)]
    for i, j in _alike(vectors, vectors):
        if i < j:
            first, second = sorted((root(families[i]), root(families[j])))
            parent[second] = first
    near: list[list[int]] = [[] for _ in texts]
    if others:
        for i, j in _alike(vectors, every[len(texts) :]):
            near[i].append(j)
    return [root(family) for family in families], near


def near_duplicates(texts: Sequence[str]) -> list[bool]:
    """Of each text whether one before it is nearly the same."""
    _, near = merge_beside(texts, [str(i) for i in range(len(texts))], texts)
    return [any(j < i for j in alike) for i, alike in enumerate(near)]


def _alike(some: Any, others: Any) -> Iterator[tuple[int, int]]:
    similar = (some @ others.T).tocoo()
    for i, j, value in zip(similar.row, similar.col, similar.data, strict=True):
        if value >= NEAR_DUPLICATE:
            yield int(i), int(j)


def assign_splits(groups: Sequence[str], strata: Sequence[str], seed: int) -> dict[str, Split]:
    """Group -> split. ``groups`` and ``strata`` have one entry per row; each stratum is divided by rows on its own.

    Groups come in an order that a hash of seed and name gives; each goes where most rows are still missing. A group
    with rows in several strata belongs to the one of its first row.
    """
    rows: dict[str, int] = defaultdict(int)
    stratum: dict[str, str] = {}
    for group, name in zip(groups, strata, strict=True):
        rows[group] += 1
        stratum.setdefault(group, name)
    assigned: dict[str, Split] = {}
    for name in sorted(set(stratum.values())):
        members = sorted((g for g in stratum if stratum[g] == name), key=lambda g: _order(seed, g))
        total = sum(rows[group] for group in members)
        missing = {split: SHARES[split] * total for split in SPLITS}
        for group in sorted(members, key=lambda g: -rows[g]):
            split = max(SPLITS, key=lambda s: missing[s] / SHARES[s])
            assigned[group] = split
            missing[split] -= rows[group]
    return assigned


def _order(seed: int, group: str) -> str:
    return hashlib.sha256(f"{seed}|{group}".encode()).hexdigest()
