"""A folder that is one process' own while it lives, and removed after it: worker processes of one proxy count in one,
and each answers the console there; other providers are asked over a socket in one.

Owns the folder's place, its lock, and removing those whose proxy was killed. The lock is the kernel's: it ends with the
process that holds it, however that ends, and no other process of the same id can be taken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

METRICS, PROVIDERS = "guard-metrics-", "guard-providers-"
"""How their names begin."""

OWNER = "owner.lock"


@contextlib.contextmanager
def owned_folder(prefix: str) -> Iterator[str]:
    """A new one, which nobody else may enter, for as long as the block takes. Those that this user's killed processes
    have left are removed."""
    _remove_left(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        # Locked before it has its name: whoever finds the name free of a lock knows that its owner is gone.
        new, owner = Path(folder, "new.lock"), Path(folder, OWNER)
        with new.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            new.rename(owner)
            yield folder


def _remove_left(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # It may be removed by another start meanwhile, or be somebody else's: then it is not this one's to remove.
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
