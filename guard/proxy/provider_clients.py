"""The HTTP clients that litellm uses: none of them follows a redirect, and what they send and hear is noted.

Owns the changes to these libraries, which are made in the process of litellm alone. A redirect would take the prompt,
and the provider's key with it, to an address that nobody configured.
"""

from __future__ import annotations

import contextvars
import importlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

HTTPX = ("httpx", "httpx2")
"""The same library under two names; the second is what openai's client stands on."""

HEARD_BYTES = 65_536


class Traffic:
    """What one request to litellm came to outside: how often something was sent, and the last answer to that."""

    def __init__(self) -> None:
        self.sent = 0
        self.response: Any = None
        self._heard: deque[bytes] = deque()
        self._size = 0

    def hear(self, chunk: bytes) -> None:
        self._heard.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._heard[0]) > HEARD_BYTES:
            self._size -= len(self._heard.popleft())

    @property
    def heard(self) -> bytes:
        """The end of a stream's answer."""
        return b"".join(self._heard)

    @property
    def ended(self) -> bool | None:
        """Whether a stream's provider said that it is at its end; None where its form has no word for that."""
        heard = self.heard
        if any(line.replace(b" ", b"").strip() == b"data:[DONE]" for line in heard.split(b"\n")):
            return True
        return b'"finishReason"' in heard if b'"candidates"' in heard else None

    def body(self) -> bytes | None:
        """Of the last answer; None where nobody has read it."""
        try:
            return bytes(self.response.content)
        except RuntimeError:
            return None


current: contextvars.ContextVar[Traffic | None] = contextvars.ContextVar("traffic", default=None)


def watch_clients() -> None:
    for name in HTTPX:
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        _watch_httpx(module)
    _watch_aiohttp(importlib.import_module("aiohttp"))
    try:
        _watch_requests(importlib.import_module("requests"))
    except ModuleNotFoundError:
        return


def _watch_httpx(module: Any) -> None:
    class Heard(module.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, stream: Any, traffic: Traffic) -> None:
            self._stream, self._traffic = stream, traffic

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for chunk in self._stream:
                self._traffic.hear(chunk)
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    send, send_async = module.Client.send, module.AsyncClient.send

    def sent(client: Any, request: Any, **options: Any) -> Any:
        traffic = _sending(request)
        response = send(client, request, **{**options, "follow_redirects": False})
        return _answered(response, traffic)

    async def sent_async(client: Any, request: Any, **options: Any) -> Any:
        traffic = _sending(request)
        response = await send_async(client, request, **{**options, "follow_redirects": False})
        if traffic is not None and options.get("stream"):
            response.stream = Heard(response.stream, traffic)
        return _answered(response, traffic)

    module.Client.send, module.AsyncClient.send = sent, sent_async


def _sending(request: Any) -> Traffic | None:
    # What is heard is to be read.
    request.headers["accept-encoding"] = "identity"
    traffic = current.get()
    if traffic is not None:
        traffic.sent += 1
        traffic.response = None
    return traffic


def _answered(response: Any, traffic: Traffic | None) -> Any:
    # Callers may follow it by hand.
    response.next_request = None
    if traffic is not None:
        traffic.response = response
    return response


def _watch_aiohttp(module: Any) -> None:
    request = module.ClientSession._request

    async def requested(session: Any, method: str, url: Any, **options: Any) -> Any:
        return await request(session, method, url, **{**options, "allow_redirects": False})

    module.ClientSession._request = requested


def _watch_requests(module: Any) -> None:
    send = module.Session.send

    def sent(session: Any, request: Any, **options: Any) -> Any:
        return send(session, request, **{**options, "allow_redirects": False})

    module.Session.send = sent
