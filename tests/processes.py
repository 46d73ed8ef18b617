"""Which processes another one has started, and whether they still run."""

from __future__ import annotations

import psutil


def started_by(process_id: int | None, word: str, *, recursive: bool = False) -> list[psutil.Process]:
    """Those of its children (``None``: this process's) that run and have the word in their command line.

    A child that has ended and that nobody has waited for yet has no command line: it is left out, as is one that ends
    while they are looked through.
    """

    def has_it(one: psutil.Process) -> bool:
        try:
            return word in " ".join(one.cmdline())
        except psutil.NoSuchProcess:
            return False

    return [one for one in psutil.Process(process_id).children(recursive=recursive) if has_it(one)]


def runs(one: psutil.Process) -> bool:
    """False for one that is gone, and for one that has ended and that nobody has waited for."""
    try:
        return bool(one.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def process_runs(process_id: int) -> bool:
    """The same, by its number."""
    try:
        return runs(psutil.Process(process_id))
    except psutil.NoSuchProcess:
        return False
