"""The connection to vLLM, or to several of them: one pool of kept connections for each process.

Owns what vLLM is sent, its time limits, who of several is healthy, and that a request which is left early is closed at
once, which makes vLLM stop generating. Reads no body.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec
from yarl import URL

from guard.proxy.answer import EARLY_HEADER, Answer, Forwarded, PlainAnswer, Whole, answer_of, check_status
from guard.proxy.errors import LoopError, UpstreamError, upstream_errors
from guard.proxy.loops import VIA, Hops
from guard.proxy.replicas import Replica, Replicas
from guard.settings import Settings, SettingsError

log = logging.getLogger("guard.upstream")

KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s after which vLLM closes an idle connection: never send on one that is just being closed."""

HEALTH_TIMEOUT_S = 2.0
HEALTH_EVERY_S = 2.0
"""How often several servers are asked whether they are healthy; a single one is asked when somebody wants to know."""

NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Nothing of the request was sent, so another server may be asked without anything being done twice."""

CAPABILITIES = "/v1/mia/capabilities"

NO_HEADERS: Mapping[str, str] = {}
LEADS_BACK = "what is sent there comes back to the guard"


class _Taps(msgspec.Struct):
    probes: dict[str, int] = {}


class _Capabilities(msgspec.Struct):
    """Of what the aperture's route says, what is wanted here. ``taps``: null for an engine without any."""

    taps: _Taps | None


class Upstream:
    """Use as a context manager around the application's life. ``headers`` of its methods: what of a client's request is
    sent on."""

    def __init__(self, settings: Settings, hops: Hops) -> None:
        self.replicas = Replicas(settings.upstream)
        self._tls = _trusting(settings.upstream_ca)
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
        )
        # Byte for byte: no compression, whose undoing would change the bytes.
        self._headers = {"accept-encoding": "identity", VIA: hops.own}
        if settings.upstream_api_key is not None:
            self._headers["authorization"] = f"Bearer {settings.upstream_api_key.get_secret_value()}"
        self._session: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # Limits are vLLM's: a request that waits here would not be in its queue, nor in its metrics.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=self._tls),
            timeout=self._timeout,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._watching = asyncio.create_task(self._watch(), name="upstreams")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def ask(
        self,
        path: str,
        body: bytes,
        request_id: str,
        headers: Mapping[str, str],
        *,
        early: bool,
        affinity: bytes = b"",
    ) -> AsyncIterator[asyncio.Task[Answer]]:
        """Send a request to ``path``; the task ends when the answer's head is there. Left, the connection is given back
        when the answer was read to its end, and closed otherwise. ``affinity``: equal for prompts that begin alike."""
        headers = {**headers, "content-type": "application/json", "x-request-id": request_id}
        if early:
            headers[EARLY_HEADER] = "1"
        asked = _Asked(self.replicas.in_order(affinity))
        opening = asyncio.create_task(self._open(path, body, headers, asked))
        try:
            yield opening
        finally:
            if not opening.done() or opening.cancelled() or opening.exception() is not None:
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
            asked.leave()

    async def _open(self, path: str, body: bytes, headers: Mapping[str, str], asked: _Asked) -> Answer:
        with upstream_errors():
            response = await self._first_reached("POST", path, asked, data=body, headers=headers)
        return answer_of(response)

    @asynccontextmanager
    async def forward(
        self,
        method: str,
        target: str,
        body: bytes,
        request_id: str,
        media_type: str | None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> AsyncIterator[Forwarded]:
        """Any request, as it is but for its headers. target: path and query."""
        headers = {**headers, "x-request-id": request_id} | ({"content-type": media_type} if media_type else {})
        asked = _Asked(self.replicas.in_order(b""))
        try:
            with upstream_errors():
                response = await self._first_reached(method, target, asked, data=body, headers=headers)
            if not 200 <= response.status < 600:
                raise UpstreamError(f"the model server answered with status {response.status}, which says nothing")
            yield Forwarded(response)
        finally:
            asked.leave()

    async def _first_reached(self, method: str, path: str, asked: _Asked, **request: Any) -> aiohttp.ClientResponse:
        """The answer of the first server that can be reached."""
        for replica in asked.order:
            asked.turn_to(replica)
            try:
                url = _url(replica.url, path)
                asked.response = await self._client.request(method, url, allow_redirects=False, **request)
            except NOT_REACHED:
                self._found(replica, healthy=False)
                if replica is asked.order[-1]:
                    raise
            else:
                if asked.response.status == LoopError.status:
                    raise LoopError(f"{LEADS_BACK}: the address of a model server is wrong")
                return asked.response
        raise UpstreamError("no model server is configured")

    async def get(self, path: str, request_id: str, headers: Mapping[str, str] = NO_HEADERS) -> Whole:
        """A small answer, whole."""
        asked = _Asked(self.replicas.in_order(b""))
        try:
            with upstream_errors():
                headers = {**headers, "x-request-id": request_id}
                response = await self._first_reached("GET", path, asked, headers=headers)
                check_status(response.status)
                return await PlainAnswer(response).whole()
        finally:
            asked.leave()

    async def healthy(self, headers: Mapping[str, str] = NO_HEADERS) -> int:
        """How many servers say within ``HEALTH_TIMEOUT_S`` that they can answer."""
        return sum(await asyncio.gather(*(self._ask_health(one, headers) for one in self.replicas.all)))

    async def probes(self) -> frozenset[str]:
        """Names of the probes that all servers were started with, of those who ever told. Raises nothing: of a server
        that does not answer what it said before still counts."""
        await asyncio.gather(*(self._ask_probes(one) for one in self.replicas.all))
        told = [one.probes for one in self.replicas.all if one.probes is not None]
        return frozenset.intersection(*told) if told else frozenset()

    async def _ask_probes(self, replica: Replica) -> None:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._client.get(f"{replica.url}{CAPABILITIES}", timeout=timeout) as response:
                told = await response.read()
                has_routes = response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        try:
            taps = msgspec.json.decode(told, type=_Capabilities).taps if has_routes else None
        except msgspec.MsgspecError:
            taps = None
        replica.probes = frozenset(taps.probes) if taps is not None else frozenset()

    async def _watch(self) -> None:
        while len(self.replicas.all) > 1:
            await self.healthy()
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _ask_health(self, replica: Replica, headers: Mapping[str, str]) -> bool:
        timeout, why = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S), ""
        try:
            async with self._client.get(f"{replica.url}/health", timeout=timeout, headers=headers) as response:
                healthy = response.status == 200
                why = f": {LEADS_BACK}" if response.status == LoopError.status else ""
        except (aiohttp.ClientError, TimeoutError, OSError):
            healthy = False
        self._found(replica, healthy=healthy, why=why)
        return healthy

    def _found(self, replica: Replica, *, healthy: bool, why: str = "") -> None:
        if replica.healthy != healthy:
            log.warning("the model server %s is %s%s", replica.url, "healthy again" if healthy else "not healthy", why)
        replica.healthy = healthy

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the application's lifespan has not begun"
        return self._session


@lru_cache(maxsize=64)
def _url(base: str, target: str) -> URL:
    """``target``: path and query, as they are. Most requests go to one of a few."""
    return URL(base + target, encoded=True)


def _trusting(ca: Path | None) -> ssl.SSLContext | Literal[True]:
    """Whose certificates are believed; True: those that the system trusts. Raises ``SettingsError``."""
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise SettingsError(f"upstream_ca (GUARD_UPSTREAM_CA): {ca} has no certificates: {error.reason}") from None


class _Asked:
    """One request on its way through ``order``: the server that has it now, and its answer."""

    def __init__(self, order: list[Replica]) -> None:
        self.order = order
        self.response: aiohttp.ClientResponse | None = None
        self._now: Replica | None = None
        # Counted when it is chosen: the next request's choice may come before this one is sent.
        for first in order[:1]:
            self.turn_to(first)

    def turn_to(self, replica: Replica) -> None:
        if self._now is not None:
            self._now.in_flight -= 1
        replica.in_flight += 1
        self._now = replica

    def leave(self) -> None:
        if self._now is not None:
            self._now.in_flight -= 1
            self._now = None
        if self.response is not None:
            self.response.close()
