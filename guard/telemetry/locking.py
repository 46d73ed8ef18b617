"""Locks between processes, of which nobody can make another wait for ever.

Whoever may read a file can lock it (``flock``) and keep it. Owns how long is waited for that.
"""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

POLL_S = 0.001
LONGEST_POLL_S = 0.02


@contextmanager
def locked(file: int, path: Path, wait_s: float, kind: Literal["shared", "exclusive"] = "exclusive") -> Iterator[None]:
    """Hold the lock of an open file. ``path``: what it is called. Raises ``TimeoutError`` after ``wait_s`` seconds."""
    operation = fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX
    until_s, pause_s = time.monotonic() + wait_s, POLL_S
    while True:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until_s:
                why = f"another process has held the lock on {path.name} for {wait_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, why, str(path)) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
