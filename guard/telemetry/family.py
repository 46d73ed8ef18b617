"""What a metric is, before it has a value: name, kind, meaning, labels with what bounds them, buckets.

Owns the declaration's type and how prometheus-client's objects come of it. The declarations are the proxy's in
``families`` and the engine side's in ``guard.mia.metrics``; ``docs/metrics.md`` is written from both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Kind = Literal["counter", "gauge", "histogram"]
Values = tuple[str, ...] | str
"""Of a label: all that it can be; or, in words, what bounds them."""

Merged = Literal["livesum", "livemax", "livemin", "mostrecent"]


@dataclass(frozen=True)
class Family:
    """``name``: as it is queried, a histogram without suffix. ``merged``: what one number a gauge is of those of
    several processes; ``live``: of those that still run."""

    name: str
    kind: Kind
    meaning: str
    labels: Mapping[str, Values] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    merged: Merged = "mostrecent"


def created(family: Family) -> str | None:
    """The series beside it that says when it began, in seconds since 1970; None where it has none. prometheus-client
    makes it unless ``PROMETHEUS_DISABLE_CREATED_SERIES`` is set, or several processes count together."""
    return None if family.kind == "gauge" else f"{family.name.removesuffix('_total')}_created"


def counter(family: Family, registry: CollectorRegistry) -> Counter:
    assert family.kind == "counter"
    return Counter(family.name, family.meaning, tuple(family.labels), registry=registry)


def gauge(family: Family, registry: CollectorRegistry) -> Gauge:
    assert family.kind == "gauge"
    return Gauge(family.name, family.meaning, tuple(family.labels), registry=registry, multiprocess_mode=family.merged)


def histogram(family: Family, registry: CollectorRegistry) -> Histogram:
    assert family.kind == "histogram"
    return Histogram(family.name, family.meaning, tuple(family.labels), registry=registry, buckets=family.buckets)


def values(family: Family, label: str) -> tuple[str, ...]:
    """All that a label can be, where the code knows."""
    known = family.labels[label]
    assert not isinstance(known, str), f"{family.name}: {label} is bounded by {known}"
    return known
