"""The connection to vLLM: one pool of kept connections for each process.

Owns what vLLM is sent, its time limits, and that a request which is left early is closed at once, which makes vLLM stop
generating. Reads no body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from guard.proxy.answer import EARLY_HEADER, Answer, Forwarded, PlainAnswer, Whole, answer_of
from guard.proxy.errors import upstream_errors
from guard.settings import Settings

KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s after which vLLM closes an idle connection: never send on one that is just being closed."""

HEALTH_TIMEOUT_S = 2.0
CLIENT_HEADERS = ("traceparent", "tracestate")
"""The only headers of a client's request that vLLM gets. Its key is not among them."""


class Upstream:
    """Use as a context manager around the application's life."""

    def __init__(self, settings: Settings) -> None:
        self._base = settings.upstream
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
        )
        # Byte for byte: no compression, whose undoing would change the bytes.
        self._headers = {"accept-encoding": "identity"}
        if settings.upstream_api_key is not None:
            self._headers["authorization"] = f"Bearer {settings.upstream_api_key.get_secret_value()}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # Limits are vLLM's: a request that waits here would not be in its queue, nor in its metrics.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=self._timeout,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def ask(
        self, path: str, body: bytes, request_id: str, client_headers: Mapping[str, str], *, early: bool
    ) -> AsyncIterator[asyncio.Task[Answer]]:
        """Send a request to ``path``; the task ends when the answer's head is there. Left, the connection is given back
        when the answer was read to its end, and closed otherwise."""
        headers = {name: client_headers[name] for name in CLIENT_HEADERS if name in client_headers}
        headers |= {"content-type": "application/json", "x-request-id": request_id}
        if early:
            headers[EARLY_HEADER] = "1"
        responses: list[aiohttp.ClientResponse] = []
        opening = asyncio.create_task(self._open(path, body, headers, responses))
        try:
            yield opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            for response in responses:
                response.close()

    async def _open(
        self, path: str, body: bytes, headers: Mapping[str, str], responses: list[aiohttp.ClientResponse]
    ) -> Answer:
        with upstream_errors():
            response = await self._client.post(f"{self._base}{path}", data=body, headers=headers, allow_redirects=False)
        responses.append(response)
        return answer_of(response)

    @asynccontextmanager
    async def forward(
        self, method: str, target: str, body: bytes, request_id: str, media_type: str | None
    ) -> AsyncIterator[Forwarded]:
        """Any request, as it is but for its headers. target: path and query."""
        headers = {"x-request-id": request_id} | ({"content-type": media_type} if media_type else {})
        url = URL(f"{self._base}{target}", encoded=True)
        with upstream_errors():
            response = await self._client.request(method, url, data=body, headers=headers, allow_redirects=False)
        try:
            yield Forwarded(response)
        finally:
            response.close()

    async def get(self, path: str, request_id: str) -> Whole:
        """A small answer, whole."""
        with upstream_errors():
            async with self._client.get(
                f"{self._base}{path}", headers={"x-request-id": request_id}, allow_redirects=False
            ) as response:
                return await PlainAnswer(response).whole()

    async def healthy(self) -> bool:
        """Whether vLLM says within ``HEALTH_TIMEOUT_S`` that it can answer."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._client.get(f"{self._base}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the application's lifespan has not begun"
        return self._session
