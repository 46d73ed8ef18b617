"""Files of JSON lines that people write, as rows with their numbers.

Owns what a line is and how a line that is no JSON is told. What the rows mean is for whoever asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class LinesError(ValueError):
    """A file that cannot be read as JSON lines; the message names file and row, and quotes neither."""


def text_of(path: Path) -> str:
    """The whole file, UTF-8, with its line ends as they are. Raises ``LinesError``."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise LinesError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LinesError(f"{path}: is not UTF-8 (byte {error.start})") from None


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Each line that is not empty, with its number from 1. Raises ``LinesError``.

    A line ends with a line feed and with nothing else: JSON's texts may hold U+2028 and U+0085 as they are.
    """
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise LinesError(f"{path}: row {number}: not JSON ({error.msg} at column {error.colno})") from None
            except RecursionError:
                raise LinesError(f"{path}: row {number}: lists or objects in one another too deep to read") from None
            except ValueError:  # Python turns no number of more than 4,300 digits into an integer
                raise LinesError(f"{path}: row {number}: has a number of too many digits") from None
