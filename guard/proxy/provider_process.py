"""litellm in a process of its own, one for each of the proxy's: its work is slow and may have no end, and stops nobody
but those who ask models of other providers.

Owns that process and the connection to it, a Unix socket in a folder that nobody else may enter. It is started with the
proxy, asked every second whether it still answers, started again when it does not or has ended, and ends with the
proxy. Whatever ends it ends every request that it had, at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal
from weakref import WeakSet

import aiohttp
import msgspec

from guard.owned_folder import PROVIDERS, owned_folder
from guard.proxy.errors import Told, UpstreamError, UpstreamLostError, UpstreamSilentError, upstream_errors
from guard.proxy.provider_link import CHECK, PING, Model
from guard.supervisor import backoff

log = logging.getLogger("guard.providers")

BASE = "http://litellm"
"""Of addresses on that socket; the name says nothing."""

START_LIMIT_S = 120.0
"""Longest time that loading litellm may take."""

READY_LIMIT_S = 60.0
"""How long a request waits for it."""

CHECK_LIMIT_S = 60.0
"""How long looking at all models may take; then nothing is said of any."""

CONNECT_AGAIN_S = 0.02
"""How soon, where nobody took the connection: it has just ended, or as many wait there as may."""

SOCKET_BYTES = 107
"""Longest path of a socket that the kernel takes."""

PING_EVERY_S = 1.0
PING_LIMIT_S = 5.0
MISSED_PINGS = 3
"""So many in turn, and it is at something that it does not let go of. What it may rightly be asked takes it some
seconds on a slow machine, in which it answers nothing."""

LOST = "the process that asks other providers ended before the answer was complete"
NOT_STARTED = "the process that asks other providers does not start"

State = Literal["starting", "ok", "unavailable"]

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
        if len(os.fsencode(self.socket)) > SOCKET_BYTES:
            self._ends.close()
            raise OSError(errno.ENAMETOOLONG, f"{self.socket} is too long for a socket: set TMPDIR to a shorter folder")
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
    """``models``: looked at once it has started. ``read_timeout_s``: how long it may say nothing."""

    def __init__(self, models: Sequence[Model], read_timeout_s: float) -> None:
        self._models = models
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=read_timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._under_way: WeakSet[aiohttp.ClientResponse] = WeakSet()
        self._up, self._was_up = False, False
        self._known = asyncio.Event()
        """Set while it is up, and where it did not start."""
        self.why_not: Sequence[str | None] = ()
        """Of each model, once it has started: why it cannot be asked; None where it can."""

    @property
    def state(self) -> State:
        if self._up:
            return "ok"
        return "unavailable" if self._was_up or self._known.is_set() else "starting"

    @property
    def was_up(self) -> bool:
        return self._was_up

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For as long as the application lives."""
        keeping = asyncio.create_task(self._keep(), name="providers")
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def tried(self) -> bool:
        """Whether the first one started, once that is known."""
        await self._known.wait()
        return self._was_up

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """The answer, once its head is there; closing it ends the request. Raises ``UpstreamError``."""
        until_s = time.monotonic() + READY_LIMIT_S
        with upstream_errors(FROM_PROCESS):
            while True:
                await self.there()
                session = self._session
                assert session is not None, "it is there as long as the process is up"
                try:
                    response = await session.post(BASE + path, data=body, headers=headers)
                except aiohttp.ClientConnectorError:
                    # Nothing was sent.
                    if time.monotonic() > until_s:
                        raise
                    await asyncio.sleep(CONNECT_AGAIN_S)
                    continue
                self._under_way.add(response)
                if session.closed:
                    self._cut(response)
                return response

    async def there(self) -> None:
        """Waits until it is up. Raises ``UpstreamLostError``."""
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                await self._known.wait()
        except TimeoutError:
            raise UpstreamLostError(NOT_STARTED) from None
        if not self._up:
            raise UpstreamLostError(NOT_STARTED)

    async def _keep(self) -> None:
        """Never returns; cancel it."""
        delays_s = backoff()
        while True:
            was_up = False
            try:
                async with self._child() as child:
                    was_up = await self._watch(child)
            except OSError as error:
                log.error("no process for other providers can be started: %s", error.strerror)
            if was_up:
                delays_s = backoff()
            else:
                self._known.set()
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
            if self._up:
                self._up = False
                self._known.clear()
            for response in tuple(self._under_way):
                self._cut(response)
            await self._session.close()
            # Much memory takes the kernel a while.
            await asyncio.to_thread(child.end)

    def _cut(self, response: aiohttp.ClientResponse) -> None:
        """Whoever reads there is told: a connection that is closed from this side says nothing."""
        self._under_way.discard(response)
        if not response.content.is_eof():
            response.content.set_exception(aiohttp.ClientConnectionError())

    async def _watch(self, child: Child) -> bool:
        """Until it is of no more use. Whether it ever was."""
        begun_s, missed = time.monotonic(), 0
        while (code := child.process.poll()) is None:
            if await self._answers():
                missed = 0
                if not self._was_up:
                    await self._check()
                self._up = self._was_up = True
                self._known.set()
            elif self._up and (missed := missed + 1) >= MISSED_PINGS:
                log.error("the process for other providers does not answer; it is started again")
                return True
            elif not self._up and time.monotonic() - begun_s > START_LIMIT_S:
                log.error("the process for other providers does not start; it is tried again")
                return False
            await asyncio.sleep(PING_EVERY_S if self._up else PING_EVERY_S / 10)
        log.error("the process for other providers ended with exit code %s; it is started again", code)
        return self._up

    async def _answers(self) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(BASE + PING, timeout=aiohttp.ClientTimeout(total=PING_LIMIT_S)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _check(self) -> None:
        """Which models cannot be asked."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=CHECK_LIMIT_S)
        body = msgspec.json.encode(self._models)
        try:
            async with self._session.post(BASE + CHECK, data=body, timeout=timeout) as answer:
                self.why_not = msgspec.json.decode(await answer.read(), type=list[str | None])
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            return
