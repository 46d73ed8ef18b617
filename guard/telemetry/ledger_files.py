"""Where a ledger's files are, and their lines.

    ledger.jsonl                   what is written to now
    ledger-000000000001.jsonl      what was rotated out, named after the number of its first entry
    ledger.jsonl.head              the chain's end, and the lock between writers (``chain.py``, ``ledger_file.py``)
    ledger-content/2026-12-30.jsonl   captured text, by the last day on which it is kept (``content.py``)

Owns the names, and reading lines from either end. Never writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 16
SEARCHED_BYTES = 1 << 20


def head_path(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.head")


def content_folder(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.stem}-content")


def rotated_path(ledger: Path, first_entry: int) -> Path:
    """The name of a file that is written to no more."""
    return ledger.with_name(f"{ledger.stem}-{first_entry:012d}{ledger.suffix}")


def rotated_files(ledger: Path) -> list[Path]:
    """Those there are, the oldest first. Raises ``OSError``."""
    form = re.compile(rf"{re.escape(ledger.stem)}-\d{{12,}}{re.escape(ledger.suffix)}")
    names = [entry.name for entry in os.scandir(ledger.parent) if form.fullmatch(entry.name)]
    return sorted((ledger.with_name(name) for name in names), key=lambda file: first_entry_of(ledger, file))


def first_entry_of(ledger: Path, rotated: Path) -> int:
    """The number in a rotated file's name."""
    return int(rotated.name[len(ledger.stem) + 1 : len(rotated.name) - len(ledger.suffix)])


def ledger_files(ledger: Path) -> list[Path]:
    """All with entries, the oldest first, the one that is written to last. Raises ``OSError`` when there is none."""
    files = rotated_files(ledger)
    if not ledger.exists():
        if not files:
            ledger.stat()
        return files
    return [*files, ledger]


def open_all(ledger: Path) -> list[tuple[Path, BinaryIO]]:
    """Every file, opened for whoever closes them. A file that is rotated or deleted meanwhile stays readable.

    Raises ``OSError``.
    """
    while True:
        opened: list[tuple[Path, BinaryIO]] = []
        try:
            files = ledger_files(ledger)
            opened += [(file, file.open("rb")) for file in files]
            if ledger_files(ledger) == files and (files[-1] != ledger or _same(files[-1], opened[-1][1])):
                return opened
        except FileNotFoundError:
            if not ledger.exists() and not rotated_files(ledger):
                raise
        for _, file in opened:
            file.close()


def _same(path: Path, file: BinaryIO) -> bool:
    return os.path.samestat(path.stat(), os.fstat(file.fileno()))


def lines_forwards(ledger: Path) -> Iterator[bytes]:
    """Every line, the oldest first, with its end where it has one. Raises ``OSError``."""
    opened = open_all(ledger)
    try:
        for _, file in opened:
            yield from file
    finally:
        for _, file in opened:
            file.close()


def lines_backwards(ledger: Path) -> Iterator[bytes]:
    """Every line without its end, the newest first. Raises ``OSError``."""
    opened = open_all(ledger)
    try:
        for _, file in reversed(opened):
            for _, line in placed_backwards(file):
                yield line
    finally:
        for _, file in opened:
            file.close()


def lines_with(file: BinaryIO, text: bytes) -> Iterator[bytes]:
    """Lines of a file that have ``text`` in them, from the end, each without its end. Those that have not cost nearly
    nothing. ``text``: not empty, without a line end."""
    # Not mapped into memory: a file that somebody cuts off meanwhile would end the process.
    at, tail = file.seek(0, os.SEEK_END), b""
    while at:
        length = min(SEARCHED_BYTES, at)
        at -= length
        file.seek(at)
        block = file.read(length) + tail
        cut = block.find(b"\n") + 1 if at else 0
        if at and not cut:
            tail = block
            continue
        # The line that begins before this block is looked at with it.
        tail, block = block[:cut], block[cut:]
        end = len(block)
        while (found := block.rfind(text, 0, end)) >= 0:
            start, stop = block.rfind(b"\n", 0, found) + 1, block.find(b"\n", found)
            yield block[start : stop if stop >= 0 else len(block)]
            end = start


def placed_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines of a file from its end, each without its end and with the place of its first byte. The last one may be
    half a line."""
    at = file.seek(0, os.SEEK_END)
    parts: list[bytes] = []
    ended = False
    while at:
        length = min(BLOCK_BYTES, at)
        at -= length
        file.seek(at)
        block = file.read(length)
        end = len(block)
        while (cut := block.rfind(b"\n", 0, end)) >= 0:
            parts.append(block[cut + 1 : end])
            if ended or any(parts):
                yield at + cut + 1, b"".join(reversed(parts))
            parts, ended, end = [], True, cut
        parts.append(block[:end])
    if ended or any(parts):
        yield 0, b"".join(reversed(parts))
