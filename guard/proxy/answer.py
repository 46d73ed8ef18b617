"""vLLM's answer in its three wire forms: first the readouts of the prompt, then the answer as vLLM wrote it.

Owns the order in which the parts are read. ``find`` may be cancelled, by a deadline, and what comes after it still has
every byte. Never decides anything.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from guard.mia.results import EVENT_OBJECT, Readouts
from guard.proxy.bytestream import ByteStream, Content
from guard.proxy.come_back import when_to_come_back
from guard.proxy.errors import UpstreamError, upstream_errors
from guard.proxy.readouts import Finding, finding_in, from_event, is_event, readouts_of, split_field

EARLY_HEADER = "x-mia-early"
LATE = "the engine sent no readouts before its answer; was it started with the plugin?"
PASSED_ON = "content-type"
"""The header of vLLM's answer that clients get beside when to come back. Its other ones describe one connection, or
vLLM itself."""


class Response(Protocol):
    """What of an HTTP response an answer is made from; aiohttp's has it."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def content(self) -> Content: ...


@dataclass(frozen=True)
class Whole:
    """An answer that is complete. ``events``: what the engine sent beside it."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    events: tuple[bytes, ...] = field(default=(), repr=False)

    def readouts(self) -> list[Readouts]:
        """All that came beside it."""
        return _all_of(self.events)


class StreamedAnswer:
    """Server-sent events; the readouts are frames of their own. ``held``: frames that came before those of the prompt;
    ``events``: all readouts so far, None for an event that cannot be read."""

    def __init__(self, response: Response) -> None:
        self.headers = passed_on(response.headers)
        self.held: list[bytes] = []
        self.events: list[list[Readouts] | None] = []
        self._bytes = ByteStream(response.content)

    async def find(self, *, patient: bool = True) -> Finding:
        """Read up to the readouts. Unless ``patient`` the first frame of the answer ends the search."""
        while frames := await self._bytes.frames():
            arrived_s = time.perf_counter()
            self.held += self._sorted(frames)
            if self.events:
                return finding_in(self.events[0], arrived_s)
            if self.held and not patient:
                return Finding(None, LATE)
        return Finding(None, LATE)

    async def batches(self) -> AsyncIterator[list[bytes]]:
        """The answer's own frames: those held, then the others as they come."""
        if self.held:
            yield self.held
        while frames := await self._bytes.frames():
            yield self._sorted(frames)

    def readouts(self) -> list[Readouts]:
        """All so far: of the prompt, and of those choices that have ended."""
        return [one for event in self.events for one in event or ()]

    def _sorted(self, frames: list[bytes]) -> list[bytes]:
        """The answer's own; the others are kept."""
        ours = [frame for frame in frames if is_event(frame)]
        # Here, where they come, and not each time that somebody looks: of a prompt they are long.
        self.events += [readouts_of(frame.removeprefix(b"data: ")) for frame in ours]
        return [frame for frame in frames if not is_event(frame)] if ours else frames


class EarlyAnswer:
    """A line with the readouts, a line with status and headers, then the body."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._bytes = ByteStream(response.content)
        self._finding: Finding | None = None
        self._events: tuple[bytes, ...] = ()

    async def find(self, *, patient: bool = True) -> Finding:
        if self._finding is None:
            line = await self._bytes.line()
            self._finding = from_event(line, time.perf_counter())
        return self._finding

    async def whole(self) -> Whole:
        await self.find()
        try:
            envelope = json.loads(await self._bytes.line())
            status, headers = (
                int(envelope["status"]),
                passed_on({str(k): str(v) for k, v in envelope["headers"].items()}),
            )
            late = envelope.get("readouts")
            event = json.dumps({"object": EVENT_OBJECT, "readouts": late}).encode() if late else None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UpstreamError("the model server's answer cannot be read") from None
        check_status(status)
        self._events = () if event is None else (event,)
        return Whole(status, headers, await self._bytes.rest(), self._events)

    def readouts(self) -> list[Readouts]:
        """All that came with the answer itself."""
        return _all_of(self._events)


class PlainAnswer:
    """JSON, in which the readouts are a field; or an error."""

    def __init__(self, response: Response) -> None:
        self.status = response.status
        self._headers = passed_on(response.headers)
        self._bytes = ByteStream(response.content)
        self._body: bytes | None = None
        self._finding = Finding(None, LATE)
        self._events: tuple[bytes, ...] = ()

    @property
    def failed(self) -> bool:
        return self.status != 200

    @property
    def read(self) -> bool:
        """Whether it came to its end."""
        return self._body is not None

    async def find(self, *, patient: bool = True) -> Finding:
        if self._body is None:
            body = await self._bytes.rest()
            arrived_s = time.perf_counter()
            self._body, event = split_field(body)
            if event is not None:
                self._finding = from_event(event, arrived_s)
                self._events = (event,)
        return self._finding

    async def whole(self) -> Whole:
        await self.find()
        return Whole(self.status, self._headers, self._body or b"", self._events)

    def readouts(self) -> list[Readouts]:
        """All that came with the answer."""
        return _all_of(self._events)


class Forwarded:
    """Any answer, as its bytes come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = passed_on(response.headers)
        self._content = response.content

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            with upstream_errors():
                chunk = await self._content.readany()
            if not chunk:
                return
            yield chunk


def _all_of(events: Sequence[bytes]) -> list[Readouts]:
    return [one for event in events for one in readouts_of(event) or ()]


Answer = StreamedAnswer | EarlyAnswer | PlainAnswer


def check_status(status: int) -> None:
    """Raises ``UpstreamError`` for one that says neither that the answer is there nor why it is not: what comes with it
    is nothing that anybody could judge or charge as either."""
    if status != 200 and not 400 <= status < 600:
        raise UpstreamError(f"the model server answered with status {status}, which is neither an answer nor an error")


def answer_of(response: aiohttp.ClientResponse) -> Answer:
    """The form is told by status and headers. Raises ``UpstreamError``."""
    check_status(response.status)
    if response.status == 200 and response.content_type == "text/event-stream":
        return StreamedAnswer(response)
    if response.status == 200 and response.headers.get(EARLY_HEADER) == "1":
        return EarlyAnswer(response)
    return PlainAnswer(response)


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers for the client."""
    found = when_to_come_back(headers)
    for name, value in headers.items():
        if name.lower() == PASSED_ON and value.isascii() and value.isprintable():
            found[PASSED_ON] = value
    return found
