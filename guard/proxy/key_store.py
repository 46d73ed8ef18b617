"""The keys that are accepted now, and how they change while requests run.

Owns the one reference that is replaced. A file that cannot be read changes nothing: the keys before it stay. Files are
looked at once a second, which sees every way of replacing one, on every file system, and costs one ``stat``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from guard.proxy.keys import Caller, KeyRing, KeysError, key_ring, read_keys

log = logging.getLogger("guard.keys")

LOOK_EVERY_S = 1.0

Stamp = tuple[int, int, int] | None


@dataclass
class Use:
    """What one process saw of a key since it started. ``last``: UTC."""

    requests: int = 0
    tokens: int = 0
    last: datetime | None = None


class KeyStore:
    """Keys of a file, and ``hashes`` of keys beside it. ``limits_count``: whether limits mean what they say here.
    ``on_reload``: told whether the file could be used, each time that it was read again.

    Raises ``KeysError`` when there is nothing to begin with."""

    def __init__(
        self,
        path: Path | None = None,
        hashes: tuple[str, ...] = (),
        *,
        limits_count: bool = True,
        on_reload: Callable[[bool], None] = lambda in_force: None,
    ) -> None:
        self.path = path
        self._on_reload = on_reload
        self._limits_count = limits_count
        self.error: str | None = None
        """Why the file that is there now is not what counts."""
        self.uses: dict[str, Use] = {}
        """By the key's id; only of keys that exist."""
        self._hashes = hashes
        self._stamp = self._look()
        self.current: KeyRing = self._read()

    def reload(self) -> bool:
        """Read the file again. False: it cannot be used, and nothing changed."""
        if self.path is None:
            return True
        self._stamp = self._look()
        try:
            new = self._read()
        except KeysError as error:
            self.error = str(error)
            log.error("keys not changed: %s", error)
            self._on_reload(False)
            return False
        self.error = None
        self.current = new
        known = {one.key_id for ring in (new.callers, new.admins) for one in (ring or {}).values()}
        self.uses = {key_id: use for key_id, use in self.uses.items() if key_id in known}
        self._on_reload(True)
        log.warning("%d keys from %s", len(known), self.path)
        return True

    def count(self, caller: Caller, tokens: int) -> None:
        """One finished request of a key."""
        if caller.key_id is not None:
            use = self.uses.setdefault(caller.key_id, Use())
            use.requests += 1
            use.tokens += tokens
            use.last = datetime.now(UTC)

    async def watch(self) -> None:
        """Reload on every change, until cancelled."""
        while self.path is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._look() != self._stamp:
                self.reload()

    def _read(self) -> KeyRing:
        ring = key_ring(read_keys(self.path) if self.path is not None else None, self._hashes)
        if not self._limits_count:
            limited = [one for one in (ring.callers or {}).values() if one.limits.any or one.tenant_limits.any]
            if limited:
                raise KeysError(
                    f"{self.path}: key {limited[0].key_id} has limits, which several worker processes count only "
                    "through Redis: set redis_url, or workers to 1"
                )
        return ring

    def _look(self) -> Stamp:
        if self.path is None:
            return None
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
