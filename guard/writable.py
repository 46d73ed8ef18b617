"""Results of commands as files: whether they can be written, asked before they are computed for an hour, and writing
them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from guard.whole_file import write_whole


class NotWritableError(ValueError):
    """A file or folder that cannot be written; the message names it and says why."""


def check_writable(folder: Path) -> None:
    """Try in the folder, or where it is to be made, and leave nothing behind. Raises ``NotWritableError``."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise NotWritableError(f"{folder}: cannot be written to: {error.strerror}") from None


def write_result(path: Path, content: bytes) -> None:
    """As ``write_whole``. Raises ``NotWritableError``."""
    with told_as(path):
        write_whole(path, content)


@contextmanager
def told_as(path: Path) -> Iterator[None]:
    """What stops the writing of ``path``, a full disk for one, as ``NotWritableError``."""
    try:
        yield
    except OSError as error:
        raise NotWritableError(f"{path}: cannot be written: {error.strerror or error}") from None
