"""The policies that judge now, and how they change while requests run: files are watched, and swapped as a whole.

Owns the one reference that is replaced. What cannot be used changes nothing: the policies before it stay.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Literal

from watchfiles import awatch

from guard.policy.policy_set import Bind, PolicySet, load_policies
from guard.policy.yaml_file import PolicyError

log = logging.getLogger("guard.policy")

Reload = Literal["success", "failure", "noop"]
"""``noop``: the files say what they said before."""

SETTLE_MS = 100
"""Changes that come this close together are one."""

RECHECK_S = 0.8
"""How often files are looked at although no change was reported: nobody reports a link to a folder that now leads
elsewhere, network file systems report nothing, nor does anybody report what changed just before the watch began."""

RETRY_S = 5.0
"""After which a watch that failed, as of a folder that is gone, is tried again."""

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
        self._bind = bind_policy
        self._on_reload = on_reload
        self._reloading = threading.Lock()
        self._stamp = self._look()

    def reload(self) -> Reload:
        """Read all files again, and let them judge from now on if all of them can. One thread at a time does."""
        with self._reloading:
            return self._reload()

    def _reload(self) -> Reload:
        self._stamp = self._look()
        try:
            new = load_policies(self.path, self._bind)
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
            try:
                await self._watch_folders(self._folders())
            except Exception:  # whatever it was, the files may change again
                log.exception("policies cannot be watched; trying again in %g s", RETRY_S)
                await asyncio.sleep(RETRY_S)

    async def _watch_folders(self, folders: tuple[Path, ...]) -> None:
        """Returns when other folders must be watched, or these anew."""
        changes = awatch(
            *folders,
            watch_filter=None,
            debounce=SETTLE_MS,
            step=SETTLE_MS // 2,
            rust_timeout=round(RECHECK_S * 1000),
            yield_on_timeout=True,
            recursive=False,
        )
        async with aclosing(changes):
            async for reported in changes:
                if reported:
                    await asyncio.to_thread(self.reload)
                elif await self._recheck():
                    return
                if self._folders() != folders:
                    return

    async def _recheck(self) -> bool:
        changed = await asyncio.to_thread(self._look) != self._stamp
        if changed:
            await asyncio.to_thread(self.reload)
        return changed

    def _folders(self) -> tuple[Path, ...]:
        """Folders and not files: a file that is replaced, as editors and Kubernetes do, is another file."""
        own = self.path if self.path.is_dir() else self.path.parent
        folders = [own, *(file.parent for file in self.current.files)]
        return tuple(sorted({folder for folder in folders if folder.is_dir()}))

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
