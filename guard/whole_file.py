"""Writes a file whole or not at all, so that whoever is killed at any time leaves no half of one under its name."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content``; until it is all there, what stood there stays. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
