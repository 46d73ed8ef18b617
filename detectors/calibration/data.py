"""``--data``: from the names that a user gives to rows, whatever they are read from.

Owns the words ``all`` and ``installed``, the sampling down to so many rows, and the check of lengths. All of it happens
before an engine starts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detectors.calibration.demands import LEAST_PER_LABEL
from detectors.calibration.own_rows import contradiction, divided_own, is_own, read_files
from detectors.calibration.rows import Row, default_rows
from detectors.calibration.sets.catalogue import INSTALLED, SETS
from detectors.calibration.sources import DataError
from detectors.calibration.wheels import WHEELS, pull

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
    names: Sequence[str], seed: int, most: int | None, tool_role: bool, say: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """All rows of sets and files; with ``most``, so many at most. Fetches wheels that are not there.

    Raises ``DataError``, also where a split would have too few rows.
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
    counts = Counter((row.split, row.label) for row in rows)
    for split in ("train", "validation", "held_out"):
        for label in ("benign", "attack"):
            if counts[split, label] < LEAST_PER_LABEL:
                raise DataError(
                    f"{counts[split, label]} {label} rows for {split}, at least {LEAST_PER_LABEL} are needed; "
                    "give more --data, or rows of more different groups"
                )
    return rows


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


def check_lengths(rows: Sequence[Row], tokenizer: Any, most_tokens: int) -> None:
    """Raise ``DataError`` for the first row that the engine would refuse."""
    for row in rows:
        try:
            rendered = tokenizer.apply_chat_template(list(row.messages), add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            raise DataError(f"{row.named}: messages: the model's template refuses them: {error}") from None
        tokens = len(rendered["input_ids"])
        if tokens >= most_tokens:
            raise DataError(f"{row.named}: has {tokens} tokens, at most {most_tokens - 1} can be read")
