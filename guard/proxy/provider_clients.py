"""The HTTP clients that litellm uses: none of them follows a redirect, asks another server than is configured, sends
anything twice or keeps a cookie, and what they send and hear is noted.

Owns the changes to these libraries, which are made in the process of litellm alone. A redirect would take the prompt,
and the provider's key with it, to an address that nobody configured.
"""

from __future__ import annotations

import contextvars
import http.cookiejar
import importlib
import json
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from guard.proxy.provider_endings import Endings, endings_in
from guard.proxy.provider_sent import json_in, missing

HTTPX = ("httpx", "httpx2")
"""The same library under two names; the second is what openai's client stands on."""

HEARD_BYTES = 65_536

FIRST_FAILED = 300
"""The first status that is no success."""

NO_TOKENS: Mapping[str, int] = {"input_tokens": 0, "output_tokens": 0}
UNTOLD: tuple[tuple[set[str], str, Any], ...] = (
    ({"choices"}, "service_tier", None),
    ({"candidates"}, "usageMetadata", {}),
    ({"promptFeedback"}, "usageMetadata", {}),
    ({"content", "stop_reason"}, "usage", NO_TOKENS),
    ({"embeddings"}, "prompt_eval_count", 0),
    ({"message", "finish_reason"}, "usage", {"tokens": NO_TOKENS, "billed_units": NO_TOKENS}),
)
"""Whole answers of Groq, Gemini, Anthropic, Ollama and Cohere: fields that they have, one that litellm cannot do
without and they can, and what that is where nothing is told."""

Origin = tuple[str, str | None, int | None]
"""Scheme, host and port."""


class NotSentError(Exception):
    """Raised in place of sending anything."""


class Traffic:
    """What one request to litellm came to outside: how often something was sent, and the last answer to that.

    ``may_ask``: addresses of whose servers any may be asked, and no other; empty: whoever litellm asks by itself.
    ``fields``: what the client asks, all of which is to be in what is sent. ``dry``: nothing is sent; ``sent`` counts
    what would have been. ``strayed``: the server that was not asked; ``unsent``: the field that would have been left
    out; ``carried``: whether a provider was asked for everything.
    """

    def __init__(
        self, may_ask: Collection[str] = (), fields: Mapping[str, Any] | None = None, *, dry: bool = False
    ) -> None:
        self._fields = fields
        self._origins = {origin_of(url) for url in may_ask}
        self._dry = dry
        self._failed: set[tuple[str, str]] = set()
        self.sent = 0
        self.strayed: str | None = None
        self.unsent: str | None = None
        self.carried = False
        self.response: Any = None
        self._asking = False
        self._answer: Any = None
        self._endings: Endings | None = None
        self._heard: deque[bytes] = deque()
        self._size = 0

    def send(self, method: str, url: str) -> None:
        """Something is about to be sent there. Raises ``NotSentError``."""
        if self._origins and origin_of(url) not in self._origins:
            scheme, host, port = origin_of(url)
            self.strayed = f"{scheme}://{host}:{port}"
            raise NotSentError
        if (method, url) in self._failed:
            # The same again, behind the client's back, though the provider may be at the first one still.
            raise NotSentError
        self.sent += 1
        self.response = None
        if self._dry:
            raise NotSentError

    def failed(self, method: str, url: str) -> None:
        """That came to nothing, though somebody was there."""
        self._failed.add((method, url))

    def carry(self, body: bytes) -> None:
        """Raises ``NotSentError`` for a question that leaves something out."""
        self._asking = False
        if self._fields is None:
            return
        try:
            self.unsent = missing(self._fields, body)
        except ValueError:
            return
        if self.unsent is not None:
            raise NotSentError
        self._answer = self._endings = None
        self.carried = self._asking = True

    def answered(self, response: Any, *, streamed: bool) -> None:
        self.response = response
        if not self._asking:
            return
        self._answer = response
        if streamed:
            self._endings = Endings(response.headers.get("content-type", ""))
            self._heard.clear()
            self._size = 0

    @property
    def has_begun(self) -> bool:
        """Whether there is an answer to what the client asked, and no error in its place."""
        return self._answer is not None and self._answer.status_code < FIRST_FAILED

    @property
    def is_heard(self) -> bool:
        """Whether the last answer is read as it comes."""
        return self._asking and self._endings is not None

    def hear(self, chunk: bytes) -> None:
        if self._endings is not None:
            self._endings.add(chunk)
        self._heard.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._heard[0]) > HEARD_BYTES:
            self._size -= len(self._heard.popleft())

    @property
    def heard(self) -> bytes:
        """The end of a stream's answer."""
        return b"".join(self._heard)

    @property
    def odd(self) -> bool:
        """Whether what was heard of a stream is none, or has a part that is none."""
        return self._endings is not None and self._endings.odd

    def endings(self, *, streamed: bool) -> dict[int, str]:
        """How each choice of the last answer ended, in the provider's word, once all of it has come."""
        if streamed and self._endings is not None:
            return self._endings.found()
        return {} if self._answer is None else endings_in(json_in(_content(self._answer) or b""))

    def body(self) -> bytes | None:
        """Of the last answer; None where nobody has read it."""
        return None if self.response is None else _content(self.response)


def origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


current: contextvars.ContextVar[Traffic | None] = contextvars.ContextVar("traffic", default=None)

_noted: contextvars.ContextVar[bool] = contextvars.ContextVar("noted", default=False)
"""Whether one of these libraries sends for another, which was noted."""


def _content(response: Any) -> bytes | None:
    """None where nobody has read it."""
    try:
        return bytes(response.content)
    except RuntimeError:
        return None


def watch_clients() -> None:
    for name in HTTPX:
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        _watch_httpx(module)
    _watch_aiohttp(importlib.import_module("aiohttp"))
    with suppress(ModuleNotFoundError):
        _watch_requests(importlib.import_module("requests"))
    _try_once(importlib.import_module("openai._models"))
    # httpx and requests stand on it. A provider's cookie of one client's request is nothing for another's.
    http.cookiejar.CookieJar.extract_cookies = _nothing  # type: ignore[method-assign, assignment]


def _nothing(*_: Any) -> None:
    return None


def _try_once(models: Any) -> None:
    """openai's client waits and tries again, whatever litellm is told of that for some APIs."""
    models.FinalRequestOptions.get_max_retries = lambda options, max_retries: 0


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
    missed = (module.ConnectError, module.ConnectTimeout, module.PoolTimeout)

    def sent(client: Any, request: Any, **options: Any) -> Any:
        with _sending(request, missed) as traffic:
            response = send(client, request, **{**options, "follow_redirects": False})
            return _answered(response, traffic, streamed=False)

    async def sent_async(client: Any, request: Any, **options: Any) -> Any:
        with _sending(request, missed) as traffic:
            response = await send_async(client, request, **{**options, "follow_redirects": False})
            _answered(response, traffic, streamed=bool(options.get("stream")))
            if traffic is not None and traffic.is_heard:
                response.stream = Heard(response.stream, traffic)
            return response

    module.Client.send, module.AsyncClient.send = sent, sent_async


@contextmanager
def _sending(request: Any, missed: tuple[type[Exception], ...]) -> Iterator[Traffic | None]:
    """Raises ``NotSentError``."""
    # What is heard is to be read.
    request.headers["accept-encoding"] = "identity"
    traffic = _note(request.method, request.url)
    if traffic is not None:
        traffic.carry(request.read() if isinstance(request.stream, Iterable) else b"")
    within = _noted.set(True)
    try:
        yield traffic
    except missed:
        raise
    except Exception:
        if traffic is not None:
            traffic.failed(request.method, str(request.url))
        raise
    finally:
        _noted.reset(within)


def _note(method: str, url: Any) -> Traffic | None:
    """Raises ``NotSentError``."""
    traffic = current.get()
    if traffic is not None and not _noted.get():
        traffic.send(method, str(url))
    return traffic


def _answered(response: Any, traffic: Traffic | None, *, streamed: bool) -> Any:
    # Callers may follow it by hand.
    response.next_request = None
    if response.status_code < FIRST_FAILED:
        _fill(response)
    if traffic is not None:
        traffic.answered(response, streamed=streamed)
        if response.status_code >= FIRST_FAILED:
            traffic.failed(response.request.method, str(response.request.url))
    return response


def _fill(response: Any) -> None:
    """A whole answer with what litellm cannot do without, such as a usage."""
    answer = json_in(_content(response) or b"")
    if not isinstance(answer, dict):
        return
    for marks, name, nothing in UNTOLD:
        if marks <= answer.keys() and name not in answer:
            response._content = json.dumps({**answer, name: nothing}).encode()


def _watch_aiohttp(module: Any) -> None:
    request = module.ClientSession._request

    async def requested(session: Any, method: str, url: Any, **options: Any) -> Any:
        _note(method, url)
        return await request(session, method, url, **{**options, "allow_redirects": False})

    module.ClientSession._request = requested
    module.abc.AbstractCookieJar.update_cookies_from_headers = _nothing


def _watch_requests(module: Any) -> None:
    send = module.Session.send

    def sent(session: Any, request: Any, **options: Any) -> Any:
        _note(request.method, request.url)
        return send(session, request, **{**options, "allow_redirects": False})

    module.Session.send = sent
