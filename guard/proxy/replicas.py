"""Which of several vLLM servers gets a request: one that is healthy, and likely has the beginning of its prompt cached.

Owns the choice and what is known of each server. Requests that begin alike go to the same server, by rendezvous
hashing, so that adding or losing one moves only its own share; unless that server has more than its share of work
(consistent hashing with bounded loads, Mirrokni et al. 2018), since one system prompt may be everybody's.
Sends nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOAD_FACTOR = 1.25
"""A server takes requests for their beginning's sake until it has this many times the average of work."""

BEGINS_WITH = ("system", "instructions", "messages", "prompt", "input")
"""Fields that a prompt begins with, in the order in which they come in it."""

COMPARED_CHARACTERS = 4096


@dataclass
class Replica:
    """One vLLM server. ``in_flight``: requests of this proxy process that it has. ``probes``: those that it was started
    with; None while nobody knows."""

    url: str
    healthy: bool = True
    in_flight: int = 0
    probes: frozenset[str] | None = None


class Replicas:
    """``urls`` are base URLs."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = tuple(Replica(url) for url in urls)

    def in_order(self, affinity: bytes) -> list[Replica]:
        """All servers, the one to ask first; the others are for when it cannot be reached. Those that are not healthy
        come last: when none is, trying is better than a refusal without trying."""
        if len(self.all) < 2:
            return list(self.all)
        ranked = sorted(self.all, key=lambda one: _weight(affinity, one.url), reverse=True)
        healthy = [one for one in ranked if one.healthy]
        if healthy:
            first = self._with_room(healthy)
            healthy = [first, *(one for one in healthy if one is not first)]
        return healthy + [one for one in ranked if not one.healthy]

    def _with_room(self, ranked: list[Replica]) -> Replica:
        total = sum(one.in_flight for one in ranked) + 1
        limit = math.ceil(LOAD_FACTOR * total / len(ranked))
        return next((one for one in ranked if one.in_flight < limit), min(ranked, key=lambda one: one.in_flight))


def affinity_of(fields: Mapping[str, Any]) -> bytes:
    """What requests have in common whose prompts begin alike: a hash of the model and of the first message."""
    first = next((fields[name] for name in BEGINS_WITH if fields.get(name)), "")
    if isinstance(first, list):
        first = first[0]
    if isinstance(first, dict) and isinstance(first.get("content"), str):
        first = first["content"]
    text = first[:COMPARED_CHARACTERS] if isinstance(first, str) else _beginning(first)
    return hashlib.sha256(f"{fields.get('model')}\n{text}".encode("utf-8", "surrogatepass")).digest()


def _beginning(value: Any) -> str:
    """Of its JSON, so many characters; the rest is not written."""
    written = ""
    for part in json.JSONEncoder().iterencode(value):
        written += part
        if len(written) >= COMPARED_CHARACTERS:
            break
    return written[:COMPARED_CHARACTERS]


def _weight(affinity: bytes, url: str) -> bytes:
    return hashlib.sha256(affinity + url.encode()).digest()
