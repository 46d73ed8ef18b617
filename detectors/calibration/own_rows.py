"""The user's own rows: JSON lines or CSV, checked whole before any engine starts.

Owns the file format. A row has ``text``, or ``messages`` in JSON lines, and ``label``; everything else is optional. An
error names file, row and field, and never quotes a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from detectors.calibration.rows import Message, Place, Row
from detectors.calibration.sources import DataError, Label, own_frames
from detectors.calibration.split import assign_splits, merge_near_duplicates
from guard.csv_rows import csv_rows
from guard.json_lines import LinesError, json_lines
from guard.mistakes import first_mistake

SUFFIXES = (".jsonl", ".csv")


def _something(value: str) -> str:
    """Templates strip white space, so that nothing would be left to read."""
    if not value.strip():
        raise ValueError("has nothing but white space")
    return value


Words = Annotated[str, Field(min_length=1), AfterValidator(_something)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant", "tool"]
    content: Words


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Label
    text: Words | None = None
    """What a user said; stands behind a system message of ours."""
    messages: Annotated[tuple[_Message, ...], Field(min_length=1)] | None = None
    """The whole conversation, its last message the one that is judged."""
    id: Annotated[str, Field(min_length=1)] | None = None
    lang: Annotated[str, Field(min_length=1)] = "en"
    group: Annotated[str, Field(min_length=1)] | None = None
    """Rows that are one idea share it, and so share a split."""
    hard: bool = False
    place: Place | None = None
    """Where not given, what the last message's role says."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("a row has either text or messages")
        if self.messages is not None and self.messages[-1].role not in ("user", "tool"):
            raise ValueError("the last of the messages is of the role user or tool")
        return self


def is_own(name: str) -> bool:
    """Whether a value of ``--data`` is a file and not a named set."""
    return name.lower().endswith(SUFFIXES)


def own_rows(path: Path, seed: int) -> list[Row]:
    """The file's rows, grouped and split as the named sets' are. Raises ``DataError`` for its first malformed row."""
    checked = [(number, _checked(path, number, raw)) for number, raw in _raw_rows(path)]
    if not checked:
        raise DataError(f"{path}: has no rows")
    source, system = path.name, own_frames().systems[1]
    texts = [row.text or (row.messages or ())[-1].content for _, row in checked]
    families = [row.group or f"{source}:{row.id or number}" for number, row in checked]
    groups = merge_near_duplicates(texts, families)
    splits = assign_splits(groups, [row.label for _, row in checked], seed)
    rows = [
        Row(
            id=row.id or f"{source}-{number}",
            source=source,
            group=group,
            split=splits[group],
            label=row.label,
            lang=row.lang,
            text=text,
            messages=_messages(row, system),
            hard=row.hard,
            place=row.place or ("tool" if row.messages is not None and row.messages[-1].role == "tool" else "user"),
            origin=f"{path}: row {number}",
        )
        for (number, row), text, group in zip(checked, texts, groups, strict=True)
    ]
    seen: set[str] = set()
    for (number, _), row in zip(checked, rows, strict=True):
        if row.id in seen:
            raise DataError(f"{path}: row {number}: id: {row.id!r} is there twice")
        seen.add(row.id)
    return rows


def _messages(row: _Row, system: str) -> tuple[Message, ...]:
    if row.messages is None:
        return ({"role": "system", "content": system}, {"role": "user", "content": row.text or ""})
    return tuple({"role": message.role, "content": message.content} for message in row.messages)


def _raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows with their numbers: lines in JSON lines, records below the header in CSV, both counted from 1."""
    try:
        yield from csv_rows(path) if path.suffix.lower() == ".csv" else json_lines(path)
    except LinesError as error:
        raise DataError(str(error)) from None


def _checked(path: Path, number: int, raw: Any) -> _Row:
    try:
        return _Row.model_validate(raw)
    except ValidationError as error:
        location, what = first_mistake(error)
        raise DataError(f"{path}: row {number}: {'.'.join(map(str, location)) or 'the row'}: {what}") from None
