"""Which weights a model's folder has: their SHA-256, computed once and remembered in the cache by size and time.

Owns the hash that calibrations are told apart by. Loads no model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from guard.paths import cache_folder
from guard.whole_file import write_whole

BYTES_AT_ONCE = 1 << 22
QUICK_BYTES = 2 << 30
"""Weights up to this size are hashed where somebody waits for an answer: seconds."""


def weights_sha256(model: Path) -> str:
    """Of the model's safetensors files, in the order of their names."""
    if (known := _known(model)) is not None:
        return known
    digest = hashlib.sha256()
    for path in _files(model):
        with path.open("rb") as stream:
            while block := stream.read(BYTES_AT_ONCE):
                digest.update(block)
    _remember(model, digest.hexdigest())
    return digest.hexdigest()


def quick_weights_sha256(model: Path) -> str | None:
    """The same where it is known or quick to find out; None else, and of a folder without such files."""
    try:
        files = _files(model)
        if not files:
            return None
        small = sum(path.stat().st_size for path in files) <= QUICK_BYTES
        return weights_sha256(model) if small else _known(model)
    except OSError:
        return None


def _files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def _note(model: Path) -> Path:
    """Named by what changes when the weights do, short of reading them."""
    seen = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(model)]
    return cache_folder() / "weights" / f"{hashlib.sha256(json.dumps(seen).encode()).hexdigest()}.sha256"


def _known(model: Path) -> str | None:
    try:
        found = _note(model).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return found if len(found) == 64 else None


def _remember(model: Path, sha256: str) -> None:
    """A cache that cannot be written is no reason to stop."""
    try:
        write_whole(_note(model), sha256.encode())
    except OSError:
        return
