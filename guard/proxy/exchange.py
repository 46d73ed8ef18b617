"""One client's request and the answer to it: headers in, status and bytes out, and when the client leaves.

Owns the ASGI calls and the headers of every answer. Never knows what is answered, or why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from guard.policy import Judges
from guard.proxy.body import GuardedRequest
from guard.proxy.capturing import Capturing
from guard.proxy.errors import ApiError, MethodError, SlowBodyError, TooLargeError
from guard.proxy.judging import Unit
from guard.proxy.keys import Caller
from guard.proxy.loops import VIA
from guard.proxy.wire import Texts
from guard.telemetry.record import RequestRecord
from guard.telemetry.tracing import CONTEXT_HEADERS, Trace

T = TypeVar("T")
JSON = {"content-type": "application/json"}

Afterwards = Callable[[float], Awaitable[object]]
"""What is done within so many seconds when a request has ended."""


class ClientGoneError(Exception):
    """Nobody is left to answer."""


async def until_left(receive: Receive, work: Coroutine[Any, Any, T], ended: Callable[[], bool] = lambda: False) -> T:
    """Do ``work``; the moment whoever is at ``receive`` leaves it is cancelled, and ``ClientGoneError`` raised, unless
    all is said already (``ended``). The request's body has been read, or nobody wants it."""
    working = asyncio.current_task()
    assert working is not None
    left = False

    def leave(_watching: asyncio.Task[None]) -> None:
        nonlocal left
        if not ended():
            left = working.cancel()

    watching = asyncio.create_task(_disconnected(receive))
    watching.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        # Unless somebody else cancels it too: a server that stops.
        if left and not working.uncancel():
            raise ClientGoneError from None
        raise
    finally:
        watching.remove_done_callback(leave)
        watching.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class Exchange:
    """``named_errors``: as a ``Form``'s. ``caller``: who asks, once that is ``known``.
    ``affinity``: equal for requests whose prompts begin alike. ``judges``: once they are
    chosen. ``capturing``: the texts, where the policy lets them be kept. ``trace``: its span, where there are traces.
    ``via``: the guards that it came through, and this one.
    ``sent``: what a model server was asked last, ``sent_times`` at once; None: nothing yet. ``afterwards``: what the
    record waits for and the client does not."""

    scope: Scope
    receive: Receive
    send: Send
    record: RequestRecord
    named_errors: bool = False
    caller: Caller = field(default_factory=Caller)
    known: bool = False
    affinity: bytes = b""
    judges: Judges | None = None
    capturing: Capturing | None = None
    trace: Trace | None = None
    via: str = ""
    sent: GuardedRequest[Texts] | None = None
    sent_times: int = 1
    headers: Headers = field(init=False)
    streaming: bool = False
    ended: bool = False
    afterwards: list[Afterwards] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.headers = Headers(scope=self.scope)

    @property
    def started(self) -> bool:
        return self.record.status is not None

    @property
    def passed(self) -> Mapping[str, str]:
        """The only headers of the request that a model server gets, the key not among them: the trace context, of our
        span or the client's own, and the guards that it came through."""
        context = self.headers if self.trace is None else self.trace.headers
        return {VIA: self.via, **{name: context[name] for name in CONTEXT_HEADERS if name in context}}

    def need_method(self, method: str) -> None:
        if self.scope["method"] != method:
            raise MethodError(f"{self.record.route} takes {method}", method)

    async def read_body(self, limit_bytes: int, timeout_s: float) -> bytes:
        """Raises ``TooLargeError``, as early as it is known, ``SlowBodyError`` or ``ClientGoneError``."""
        too_large = TooLargeError(f"the body is larger than {limit_bytes} bytes")
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                more = True
                while more:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit_bytes:
                        raise too_large
        except TimeoutError:
            raise SlowBodyError(f"the body did not come within {timeout_s:g} s") from None
        return bytes(body)

    async def until_client_leaves(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work``; the moment the client leaves it is cancelled, and ``ClientGoneError`` raised."""
        # After the last byte the server says "disconnected" too; the work then only tidies up.
        return await until_left(self.receive, work, ended=lambda: self.ended)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of a stream."""
        self.streaming = True
        await self._send_head(status, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def stream(self, data: bytes) -> None:
        self._went(data)
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        self._went(last)
        await self.send({"type": "http.response.body", "body": last})
        self.ended = True

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer."""
        await self._send_head(status, {**headers, "content-length": str(len(body))})
        await self.end(body)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error: as a status when there is none yet, else as the stream's last frame."""
        self.record.error_code = error.code
        body = error.to_json(with_type=self.named_errors)
        if not self.started:
            await self.respond(error.status, {**JSON, **error.headers}, body)
        elif self.streaming:
            await self.end((b"event: error\n" if self.named_errors else b"") + b"data: " + body + b"\n\n")

    async def settle(self, limit_s: float) -> None:
        """Do what is left for afterwards, all of it at once."""
        if self.afterwards:
            await asyncio.gather(*(work(limit_s) for work in self.afterwards))

    def withhold(self, texts: Mapping[Unit, str]) -> None:
        """Texts of an answer that the client does not get."""
        if self.capturing is not None:
            self.capturing.withhold(texts)

    def _went(self, data: bytes) -> None:
        if self.capturing is not None:
            self.capturing.went(data)

    async def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.record.status = status
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in {**headers, **self._guard_headers}.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    @property
    def _guard_headers(self) -> dict[str, str]:
        record = self.record
        headers = {
            "x-request-id": record.client_request_id or record.request_id,
            "x-guard-request-id": record.request_id,
        }
        if self.judges is not None:
            headers["x-guard-policy"] = self.judges.live.label
        if record.decision is not None:
            headers["x-guard-action"] = record.action
            if record.rules:
                headers["x-guard-rules"] = ",".join(record.rules)
        return headers
