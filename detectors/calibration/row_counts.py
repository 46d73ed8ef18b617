"""How many rows of which label each named set gives, as recorded: sets are pinned, so that counts are as well.

Owns the record, ``texts/row_counts.yaml``, which ``catalogue`` writes anew; to count needs all wheels, to tell none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

RECORD = "row_counts.yaml"
LABELS = ("benign", "attack")

Counts = Mapping[str, int]
"""Label -> rows."""


@cache
def recorded() -> Mapping[str, Counts]:
    """Set -> counts, of all rows: before ``--rows`` draws of them, and with those that are too long for a model."""
    import yaml

    text = files("detectors.calibration.texts").joinpath(RECORD).read_text(encoding="utf-8")
    found: Mapping[str, Counts] = yaml.safe_load(text)
    return found


def counted(names: Sequence[str]) -> dict[str, dict[str, int]]:
    """The same by making the rows, with seed 0. Raises ``DataError`` for a set that is not here."""
    from detectors.calibration.rows import default_rows
    from detectors.calibration.sets.long_benign import NAME, long_documents

    usual = [name for name in names if name != NAME]
    found = Counter[tuple[str, str]]((row.source, row.label) for row in default_rows(0, usual))
    if NAME in names:
        found[NAME, "benign"] = len(long_documents())
    return {name: {label: found[name, label] for label in LABELS} for name in names}


def record(names: Sequence[str], path: Path) -> None:
    """Count all and write ``path``."""
    lines = [f"{name}: {{benign: {one['benign']}, attack: {one['attack']}}}" for name, one in counted(names).items()]
    head = "# Rows of each named set. Made by: python -m detectors.calibration.sets.catalogue docs/datasets.md"
    path.write_text("\n".join([head, *lines, ""]), encoding="utf-8")


def rows_in(name: str) -> str:
    """For a table: of a set without rows of its own as many blanks."""
    one = recorded().get(name)
    return " " * 28 if one is None else f"{one['benign']:4} benign, {one['attack']:4} attacks  "
