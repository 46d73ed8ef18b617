"""How good an order of documents is, where one document is right, and by how much two orders differ.

A rank counts from 1; None where the right document is not among those that were ranked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def quality(ranks: Sequence[int | None]) -> dict[str, float]:
    """With one right answer each, nDCG@10 is 1 / log2(1 + rank), and 0 where it is not among the ten."""
    return {
        "ndcg_at_10": float(np.mean(gains(ranks))),
        "mrr_at_10": float(np.mean([1 / rank if rank else 0.0 for rank in ranks])),
        "first": float(np.mean([rank == 1 for rank in ranks])),
    }


def gains(ranks: Sequence[int | None]) -> list[float]:
    return [1 / math.log2(1 + rank) if rank else 0.0 for rank in ranks]


def difference(ours: Sequence[int | None], theirs: Sequence[int | None]) -> dict[str, float]:
    """Mean over questions, and its 95 % interval by bootstrap over questions."""
    each = np.array(gains(ours)) - np.array(gains(theirs))
    drawn = np.random.default_rng(0).choice(each, (10_000, len(each))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"mean": float(each.mean()), "low": float(low), "high": float(high)}
