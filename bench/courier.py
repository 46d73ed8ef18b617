"""How long readouts of a prompt take from their step's end to the API server, as our server's own metrics have it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

BUCKETS = "mia_courier_lag_seconds_bucket"

Counts = dict[str, float]
"""Readouts by the bucket's upper bound in seconds, each with those of all smaller bounds; JSON has no other keys."""


async def counts(url: str) -> Counts:
    """So far, of all engines of the server. Empty where it has no such metric. Raises ``aiohttp.ClientError``."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        answer.raise_for_status()
        text = await answer.text()
    found: Counts = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == BUCKETS and sample.labels["stage"] == "prompt":
                bound = sample.labels["le"]
                found[bound] = found.get(bound, 0.0) + sample.value
    return found


def between(before: Counts, after: Counts) -> Counts:
    return {bound: value - before.get(bound, 0.0) for bound, value in after.items()}


def share_within(limit_s: float, lags: Mapping[str, float]) -> float | None:
    """Part of the readouts that took at most ``limit_s``, a bucket's bound; None where there were none."""
    by_bound = {float(bound): value for bound, value in lags.items()}
    whole = by_bound.get(math.inf, 0.0)
    return by_bound[limit_s] / whole if whole else None
