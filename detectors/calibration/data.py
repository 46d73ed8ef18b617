"""``--data``: from the names that a user gives to rows, whatever they are read from.

Owns the words ``all`` and ``installed``, the sampling down to so many rows, and the check of lengths. All of it happens
before an engine starts.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from detectors.calibration.demands import LEAST_MEASURED, LEAST_PER_LABEL
from detectors.calibration.own_rows import contradiction, divided_own, is_own, read_files
from detectors.calibration.rows import Row, default_rows
from detectors.calibration.sets.catalogue import INSTALLED, SETS
from detectors.calibration.sources import DataError, Label
from detectors.calibration.split import SPLITS
from detectors.calibration.wheels import WHEELS, pull


class Use(enum.Enum):
    """What rows are for, which says how many of which split there must be."""

    fit = "fit"
    """All three splits."""
    measure = "measure"
    """Only held-out rows are looked at."""
    measure_all = "measure_all"
    """So that all rows are, all count as held out."""


ALL, ONLY_INSTALLED = "all", "installed"


def chosen_sets(names: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Named sets and files. Raises ``DataError`` for a name that is neither."""
    sets: list[str] = []
    files: list[Path] = []
    for name in names:
        if name == ALL:
            sets += sorted(SETS)
        elif name == ONLY_INSTALLED:
            sets += INSTALLED
        elif is_own(name):
            files.append(Path(name))
        elif name in SETS:
            sets.append(name)
        else:
            raise DataError(
                f"no data set {name!r}; there are: {', '.join(sorted(SETS))}, all, installed, and files *.jsonl, *.csv"
            )
    # However it is spelt, a file is one file, and its rows count once.
    return list(dict.fromkeys(sets)), list({file.resolve(): file for file in reversed(files)}.values())[::-1]


def load_rows(
    names: Sequence[str],
    seed: int,
    most: int | None,
    tool_role: bool,
    say: Callable[[str], None] = lambda _: None,
    use: Use = Use.fit,
) -> list[Row]:
    """All rows of sets and files; with ``most``, so many at most. Fetches wheels that are not there.

    Raises ``DataError``, also where a split would have too few rows for ``use``.
    """
    sets, files = chosen_sets(names)
    own = read_files(files)  # first, since they are the quickest to be wrong
    if warning := contradiction(own):
        say(warning)
    for name in sets:
        if name in WHEELS:
            say(f"data set {name}")
            pull(name)
    named = default_rows(seed, sets, tool_role=tool_role) if sets else []
    rows = sampled([*(divided_own(own, named, seed, say) if own else ()), *named], most)
    if use is Use.measure_all:
        rows = [replace(row, split="held_out") for row in rows]
    _check_counts(rows, use)
    return rows


def _check_counts(rows: Sequence[Row], use: Use) -> None:
    counts = Counter((row.split, row.label) for row in rows)
    splits, least = (SPLITS, LEAST_PER_LABEL) if use is Use.fit else (("held_out",), LEAST_MEASURED)
    for split, label in product(splits, get_args(Label)):
        if counts[split, label] >= least:
            continue
        groups = [row.group for row in rows if row.label == label]
        if not groups:
            raise DataError(f"the data has no {label} rows; give --data that has some too, such as --data own")
        remedy = "give more --data, of more different texts"
        if use is Use.measure:
            remedy += ", or --all-rows, where the detectors were fitted to none of these"
        raise DataError(
            f"{counts[split, label]} {label} rows for {split}, at least {least} are needed. The data's {len(groups)} "
            f"{label} rows make {len(set(groups))} groups, each of which is in one split: rows that are nearly the "
            f"same, or were given one group, are one; {remedy}"
        )


def sampled(rows: Sequence[Row], most: int | None) -> list[Row]:
    """At most so many, in the order given; which ones a hash of their ids says, so that fewer are a part of more."""
    if most is None or len(rows) <= most:
        return list(rows)
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(rows[i].id.encode()).digest())
    return [rows[i] for i in sorted(order[:most])]


def template_of(model: Path) -> Any:
    """The model's tokenizer, with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def knows_tool_role(tokenizer: Any) -> bool:
    """Whether the template renders a message of the role ``tool`` behind an answer without a tool call."""
    try:
        text = tokenizer.apply_chat_template(
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a"},
                {"role": "tool", "content": "what-the-tool-says"},
            ],
            tokenize=False,
        )
    except Exception:  # templates raise what they like
        return False
    return "what-the-tool-says" in text


def short_enough(
    rows: Sequence[Row], tokenizer: Any, most_tokens: int, say: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Those that the engine takes. Rows of named sets that are too long for the model are left out, and said.

    Raises ``DataError`` for the first row of the user's own that is too long, and for any that the template refuses.
    """
    found, too_long = [], 0
    for row in rows:
        try:
            rendered = tokenizer.apply_chat_template(list(row.messages), add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            raise DataError(f"{row.named}: messages: the model's template refuses them: {error}") from None
        tokens = len(rendered["input_ids"])
        if tokens < most_tokens:
            found.append(row)
        elif row.origin:
            raise DataError(f"{row.named}: has {tokens} tokens, at most {most_tokens - 1} can be read")
        else:
            too_long += 1
    if too_long:
        say(f"{too_long} rows of named sets have more than {most_tokens - 1} tokens and are left out")
    return found
