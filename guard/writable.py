"""Whether a command's results can be written, asked before it computes them for an hour."""

from __future__ import annotations

import tempfile
from pathlib import Path


class NotWritableError(ValueError):
    """A folder that cannot be written to; the message names it and says why."""


def check_writable(folder: Path) -> None:
    """Make the folder, and try. Raises ``NotWritableError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NotWritableError(f"{folder}: cannot be written to: {error.strerror}") from None
