"""The policies that judge now, and how they change while requests run: files are watched, and swapped as a whole.

Owns the one reference that is replaced. What cannot be used changes nothing: the policies before it stay.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from guard.policy.policy_set import Bind, PolicySet, load_policies
from guard.policy.yaml_file import PolicyError

log = logging.getLogger("guard.policy")

Reload = Literal["success", "failure", "noop"]
"""``noop``: the files say what they said before."""

LOOK_EVERY_S = 0.5
"""How often files are looked at. Every way of replacing one is seen, a link that leads elsewhere and what network file
systems never report too, and a look costs a few calls of ``stat``."""

SETTLE_S, SETTLING_LOOKS = 0.1, 3
"""Changes that come this close together are one, as long as that lasts no more looks than these."""

OnReload = Callable[[Reload, PolicySet], None]
Stamp = tuple[tuple[str, int, int, int], ...]


class PolicyStore:
    """Raises ``PolicyError`` when there is nothing to begin with. ``on_reload`` is called at every later attempt,
    with the policies that judge from then on."""

    def __init__(self, path: Path, bind_policy: Bind, on_reload: OnReload = lambda result, policies: None) -> None:
        self.path = path
        self.current: PolicySet = load_policies(path, bind_policy)
        self.error: str | None = None
        """Why the files that are there now are not what judges."""
        self.probes: frozenset[str] = frozenset()
        """Names of those that the engine was started with."""
        self._bind = bind_policy
        self._on_reload = on_reload
        self._reloading = threading.Lock()
        self._stamp = self._look()

    def reload(self) -> Reload:
        """Read all files again, and let them judge from now on if all of them can. One thread at a time does."""
        with self._reloading:
            return self._reload()

    def compute_by(self, probes: frozenset[str]) -> None:
        """Let an engine that was started with these multiply from now on, where a detector's weights are among them.
        The policies stay as they are."""
        with self._reloading:
            self.current, self.probes = self.current.computed_by(probes), probes

    def _reload(self) -> Reload:
        self._stamp = self._look()
        try:
            new = load_policies(self.path, self._bind).computed_by(self.probes)
        except PolicyError as error:
            self.error = str(error)
            log.error("policies not changed, version %s stays: %s", self.current.hash[:12], error)
            return self._told("failure", self.current)
        except Exception as error:  # a detector may be anybody's, and who watches must go on
            self.error = f"a detector cannot be built ({type(error).__name__})"
            log.exception("policies not changed, version %s stays", self.current.hash[:12])
            return self._told("failure", self.current)
        self.error = None
        if new.hash == self.current.hash:
            return self._told("noop", self.current)
        log.warning("policies change from version %s to %s", self.current.hash[:12], new.hash[:12])
        # Told first, so that whoever counts requests by policy is ready for the first one.
        self._told("success", new)
        self.current = new
        return "success"

    def _told(self, result: Reload, policies: PolicySet) -> Reload:
        self._on_reload(result, policies)
        return result

    async def watch(self) -> None:
        """Reload on every change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                seen = await asyncio.to_thread(self._look)
                if seen == self._stamp:
                    continue
                await self._settled(seen)
                await asyncio.to_thread(self.reload)
            except Exception:  # whatever it was, the files may change again
                log.exception("policies cannot be looked at")

    async def _settled(self, seen: Stamp) -> None:
        """Until two looks see the same: several files may be on their way. A bounded time, as they may never rest."""
        for _ in range(SETTLING_LOOKS):
            await asyncio.sleep(SETTLE_S)
            before, seen = seen, await asyncio.to_thread(self._look)
            if seen == before:
                return

    def _look(self) -> Stamp:
        """What a change of the files would change."""
        files = set(self.path.iterdir()) if self.path.is_dir() else {self.path}
        stamps = []
        for file in sorted(files | set(self.current.files)):
            try:
                stat = file.stat()
            except OSError:
                continue
            stamps.append((str(file), stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(stamps)
