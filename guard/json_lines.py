"""Files of JSON lines that people write, as rows with their numbers.

Owns what a line is and how a line that is no JSON is told. What the rows mean is for whoever asks.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class LinesError(ValueError):
    """A file that cannot be read as JSON lines; the message names file and row, and quotes neither."""


class _TwiceError(ValueError):
    """An object has a key twice."""


def text_of(path: Path) -> str:
    """The whole file, UTF-8, with its line ends as they are. Raises ``LinesError``, which names the first line that is
    not UTF-8."""
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise LinesError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        before = raw[: error.start].split(b"\n")
        raise LinesError(f"{path}: line {len(before)}: is not UTF-8 (byte {len(before[-1]) + 1} of the line)") from None


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Each line that is not empty, with its number from 1. Raises ``LinesError``.

    A line ends with a line feed and with nothing else: JSON's texts may hold U+2028 and U+0085 as they are. No object
    has a key twice: nobody knows which value was meant.
    """
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line, object_pairs_hook=_once_each)
            except json.JSONDecodeError as error:
                raise LinesError(f"{path}: row {number}: not JSON ({error.msg} at column {error.colno})") from None
            except _TwiceError as error:
                raise LinesError(f"{path}: row {number}: {error}") from None
            except RecursionError:
                raise LinesError(f"{path}: row {number}: lists or objects in one another too deep to read") from None
            except ValueError:  # Python turns no number of more than 4,300 digits into an integer
                raise LinesError(f"{path}: row {number}: has a number of too many digits") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise _TwiceError(f"the key {key[:64]!r} is written twice")
        fields[key] = value
    return fields
