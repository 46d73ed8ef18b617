"""Which rows a detector has seen: written when it is calibrated, and asked when it is evaluated.

Owns the digests of rows' texts in a calibration's record, and what is said of an evaluation on rows that were seen.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from detectors.calibration.provenance import data_sources
from detectors.calibration.rows import Row
from detectors.calibration.split import SPLITS, Split
from detectors.model_config import Calibration

DIGEST_BYTES = 5
"""Of ten thousand rows against ten thousand, one in ten thousand runs has a pair that agrees by chance."""


class Seeable(Protocol):
    """A row, or a statement made from facts. ``text``: whatever of it differs between two of them."""

    @property
    def text(self) -> str: ...

    @property
    def split(self) -> Split: ...


def seen_digests(rows: Sequence[Seeable]) -> str:
    """Of the texts of all rows that are not held out, in base64."""
    return base64.b64encode(b"".join(sorted({_digest(row) for row in rows if row.split != "held_out"}))).decode()


def seen_count(digests: str) -> int:
    """How many different texts ``seen_digests`` has told of."""
    return len(_decoded(digests)) // DIGEST_BYTES


def seen_remark(calibration: Calibration, path: Path, rows: Sequence[Row], seed: int) -> str:
    """Why figures on the held-out ones of ``rows`` may flatter a detector; empty when they do not.

    rows: of every split, of those that its kind reads. Of files that do not say which rows were seen, each set must be
    the same, row for row and split for split.
    """
    again = f"it was calibrated by: {calibration.command}"
    held_out = [row for row in rows if row.split == "held_out"]
    if calibration.seen_rows:
        raw = _decoded(calibration.seen_rows)
        seen = {raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES)}
        count = sum(_digest(row) in seen for row in held_out)
        if not count:
            return ""
        return (
            f"{count} of the {len(held_out)} rows measured are among those that it was fitted to, chosen or given "
            f"thresholds on, by {path}: its figures here flatter it; {again}"
        )
    recorded = {source.name: source.sha256 for source in calibration.data}
    # The tool-call probe's record has its rows in the order of splits.
    orders = (rows, sorted(rows, key=lambda row: SPLITS.index(row.split)))
    found = {(source.name, source.sha256) for some in orders for source in data_sources(some)}
    measured = {row.source for row in held_out}
    others = sorted(name for name, sha256 in recorded.items() if name in measured and (name, sha256) not in found)
    if not others:
        return ""
    return (
        f"{path} was fitted to other rows of {', '.join(others)}, or to another split (its seed is {calibration.seed}, "
        f"here {seed}), and does not say which: rows measured may be among them, and its figures flatter it; {again}"
    )


def _digest(row: Seeable) -> bytes:
    return hashlib.sha256(row.text.encode()).digest()[:DIGEST_BYTES]


def _decoded(digests: str) -> bytes:
    try:
        return base64.b64decode(digests, validate=True)
    except (binascii.Error, ValueError):
        return b""
