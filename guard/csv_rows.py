"""Files of comma-separated values that people write, as rows with their numbers.

Owns how a record that is not well-formed is told: which row, and which of its fields.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from guard.json_lines import LinesError, text_of

WHOLE_FIELD = re.compile(r'(?:"(?:[^"]|"")*+"|(?!")[^,\r\n]*+)(?=,|\r|\n|\Z)')
"""One well-formed field; possessive, so that a quote which is never closed is found in one go."""


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Each record below the header, with its number from 1, by the header's names; fields that are empty are left out.

    Raises ``LinesError``: nothing is guessed where a quote is not closed or a record is longer than the header.
    """
    text = text_of(path)
    # Of the line ends a reader of CSV knows only these two characters, in a field or behind it.
    lines = io.StringIO(text, newline="")
    records = csv.reader(lines, strict=True)
    header: list[str] = []
    number = 0
    while True:
        start = lines.tell()
        try:
            record = next(records, None)
        except csv.Error:
            raise LinesError(f"{path}: {_mistake(number, header, text[start:])}") from None
        if record is None:
            return
        if not record:
            continue
        if not header:
            header = record
            _check_header(path, header)
            continue
        number += 1
        if len(record) != len(header):
            raise LinesError(f"{path}: row {number}: has {len(record)} fields, and the header has {len(header)}")
        yield number, {name: value for name, value in zip(header, record, strict=True) if value != ""}


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if header.count(name) > 1:
            raise LinesError(f"{path}: the header: {name!r} is there twice")


def _mistake(before: int, header: list[str], rest: str) -> str:
    """Which field of the record that begins ``rest`` cannot be read, and why."""
    at, column, most = 0, 0, csv.field_size_limit()
    while (
        (field := WHOLE_FIELD.match(rest, at)) and len(field[0]) <= most and rest[field.end() : field.end() + 1] == ","
    ):
        at, column = field.end() + 1, column + 1
    row = f"row {before + 1}" if header else "the header"
    name = header[column] if column < len(header) else f"field {column + 1}"
    too_long = field is not None and len(field[0]) > most
    what = f"has more than {most} characters" if too_long else 'a quote (") is not closed, or not written twice inside'
    return f"{row}: {name}: {what}"
