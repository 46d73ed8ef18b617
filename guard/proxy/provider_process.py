"""litellm in a process of its own, one for each of the proxy's: its work is slow and may have no end, and stops nobody
but those who ask models of other providers.

Owns that process and the connection to it, a Unix socket in a folder that nobody else may enter. It is started with the
proxy, asked every second whether it still answers, started again when it does not or has ended, and ends with the
proxy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from guard.owned_folder import PROVIDERS, owned_folder
from guard.proxy.errors import Told, UpstreamError, UpstreamLostError, UpstreamSilentError, upstream_errors
from guard.proxy.provider_link import PING
from guard.supervisor import backoff

log = logging.getLogger("guard.providers")

BASE = "http://litellm"
"""Of addresses on that socket; the name says nothing."""

START_LIMIT_S = 120.0
"""Longest time that loading litellm may take."""

READY_LIMIT_S = 60.0
"""How long a request waits for it."""

PING_EVERY_S = 1.0
PING_LIMIT_S = 5.0
MISSED_PINGS = 3
"""So many in turn, and it is at something that it does not let go of. What it may rightly be asked takes it some
seconds on a slow machine, in which it answers nothing."""

LOST = "the process that asks other providers ended before the answer was complete"

FROM_PROCESS: Told = (
    (TimeoutError, UpstreamSilentError, "the provider did not answer in time"),
    (aiohttp.ClientPayloadError, UpstreamError, "the provider's answer broke off"),
    (aiohttp.ClientError, UpstreamLostError, LOST),
    (OSError, UpstreamLostError, LOST),
)
"""What goes wrong between the two processes."""


class Child:
    """One process, which takes a while to be ready. Raises ``OSError`` when none can be started."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        self.socket = Path(self._ends.enter_context(owned_folder(PROVIDERS)), "socket")
        # Without the folder that one happens to be in among those that modules come from; and without our own secrets.
        command = [sys.executable, "-P", "-W", "ignore", "-m", "guard.proxy.provider_worker"]
        command += [str(self.socket), str(os.getpid())]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GUARD_")}
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        except OSError:
            self._ends.close()
            raise

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._ends.close()


class ProviderProcess:
    """``read_timeout_s``: how long it may say nothing."""

    def __init__(self, read_timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=read_timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._ready = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For as long as the application lives."""
        keeping = asyncio.create_task(self._keep(), name="providers")
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """The answer, once its head is there; closing it ends the request. Raises ``UpstreamError``."""
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                await self._ready.wait()
        except TimeoutError:
            raise UpstreamLostError("the process that asks other providers does not start") from None
        assert self._session is not None, "it is there as long as the process is ready"
        with upstream_errors(FROM_PROCESS):
            return await self._session.post(BASE + path, data=body, headers=headers)

    async def _keep(self) -> None:
        """Never returns; cancel it."""
        delays_s = backoff()
        while True:
            try:
                async with self._child() as child:
                    if await self._watch(child):
                        delays_s = backoff()
            except OSError as error:
                log.error("no process for other providers can be started: %s", error.strerror)
            await asyncio.sleep(next(delays_s))

    @asynccontextmanager
    async def _child(self) -> AsyncIterator[Child]:
        child = Child()
        # A connection for each request: closing it is how a request ends, and nothing is sent to one that died.
        connector = aiohttp.UnixConnector(str(child.socket), limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        try:
            yield child
        finally:
            self._ready.clear()
            await self._session.close()
            # Much memory takes the kernel a while.
            await asyncio.to_thread(child.end)

    async def _watch(self, child: Child) -> bool:
        """Until it is of no more use. Whether it ever was."""
        begun_s, missed = time.monotonic(), 0
        while (code := child.process.poll()) is None:
            if await self._answers():
                missed = 0
                self._ready.set()
            elif self._ready.is_set() and (missed := missed + 1) >= MISSED_PINGS:
                log.error("the process for other providers does not answer; it is started again")
                return True
            elif not self._ready.is_set() and time.monotonic() - begun_s > START_LIMIT_S:
                log.error("the process for other providers does not start; it is tried again")
                return False
            await asyncio.sleep(PING_EVERY_S if self._ready.is_set() else PING_EVERY_S / 10)
        log.error("the process for other providers ended with exit code %s; it is started again", code)
        return self._ready.is_set()

    async def _answers(self) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(BASE + PING, timeout=aiohttp.ClientTimeout(total=PING_LIMIT_S)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
