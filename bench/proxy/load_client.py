"""The client of a proxy under load, in a process of its own: so many connections, each asking again when answered.

Reads one plan as JSON from stdin (``Plan``), writes one JSON object to stdout (``Observed``). Speaks just the HTTP that
it needs, so that it costs a few microseconds a token and is not what is measured. Times are seconds from the sending of
a request.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import cast

import uvloop

TOKEN = b'"content":" word"'
LITELLM_TOKEN = b'"content": " word"'


@dataclass(frozen=True)
class Plan:
    """``think_s``: mean pause of each client between two requests, exponential; 0: none. ``warm_s``: the first part,
    whose answers are not timed; after ``seconds`` more nobody asks again. ``tokens``: of an answer."""

    port: int
    key: str
    clients: int
    streamed: bool
    tokens: int
    seconds: float
    warm_s: float = 1.0
    think_s: float = 0.0
    model: str = "stub"


@dataclass
class Observed:
    """``first_s``: to the first token, or byte of a whole answer. ``answers``: all, those of the warming up too.
    ``seconds``: from the first request to the last answer. ``wrong``: answers that are not what the engine
    sent; ``errors``: what they were."""

    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    answers: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    most_open: int = 0
    cpu_s: float = 0.0


class Client(asyncio.Protocol):
    """One connection. ``ask`` sends a request; the future it returns is done with the answer."""

    def __init__(self, request: bytes, plan: Plan) -> None:
        self._request = request
        self._plan = plan
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self.sent_s = self.first_s = self.end_s = 0.0
        self.tokens = 0
        self._head: bytes | None = None
        self._left = -1
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none by class.
        self._transport = cast(asyncio.Transport, transport)

    def ask(self) -> asyncio.Future[None]:
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._head, self._left, self._tail, self.tokens, self.first_s = None, -1, b"", 0, 0.0
        self.sent_s = time.perf_counter()
        self._transport.write(self._request)
        return self._done

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._head is None:
            self._tail += data
            end = self._tail.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head, data, self._tail = self._tail[:end].lower(), self._tail[end + 4 :], b""
            if not self._head.startswith(b"http/1.1 200"):
                return self._fail(self._head[:40] + b" " + data[:300])
            at = self._head.find(b"content-length:")
            self._left = int(self._head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -1
        if self._left >= 0:
            self.first_s = self.first_s or now_s
            self._left -= len(data)
            if self._left <= 0:
                self.tokens = self._plan.tokens
                self._finish(now_s)
            return
        # A token's text may be cut by the end of what came; an answer's bytes are few enough to look again.
        text = self._tail + data
        found = text.count(TOKEN) + text.count(LITELLM_TOKEN)
        if found and not self.first_s:
            self.first_s = now_s
        self.tokens += found
        keep = text.rfind(b"data: ") if self._plan.streamed else -1
        whole_tail = keep >= 0 and (TOKEN in text[keep:] or LITELLM_TOKEN in text[keep:])
        self._tail = b"" if whole_tail else text[-300:] if keep < 0 else text[keep:]
        if text.endswith(b"0\r\n\r\n"):
            if not self._plan.streamed:
                self.tokens, self.first_s = self._plan.tokens, self.first_s or now_s
            self._finish(now_s)

    @property
    def closed(self) -> bool:
        """A server may close a connection that is not used."""
        return self._transport is None or self._transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(b"the connection was closed")

    def _finish(self, now_s: float) -> None:
        self.end_s = now_s
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, why: bytes) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(why.decode(errors="replace")))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def request_of(plan: Plan) -> bytes:
    messages = [
        {"role": "system", "content": "You are a helpful assistant. " * 8},
        {"role": "user", "content": "Tell me something about rivers, bread, clocks and gardens. " * 8},
    ]
    fields = {"model": plan.model, "messages": messages, "max_tokens": plan.tokens, "temperature": 0.5}
    body = json.dumps(fields | {"stream": plan.streamed}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{plan.port}\r\nauthorization: Bearer {plan.key}\r\n"
    head += f"accept: application/json\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def client(plan: Plan, request: bytes, observed: Observed, started_s: float, active: set[Client]) -> None:
    rng = random.Random()  # noqa: S311 - pauses, no secrets
    loop = asyncio.get_running_loop()
    end_s = started_s + plan.warm_s + plan.seconds
    connection: Client | None = None
    if plan.think_s:
        await asyncio.sleep(rng.random() * plan.think_s)
    while time.perf_counter() < end_s:
        if connection is None or connection.closed:
            _, connection = await loop.create_connection(lambda: Client(request, plan), "127.0.0.1", plan.port)
        try:
            active.add(connection)
            observed.most_open = max(observed.most_open, len(active))
            await connection.ask()
        except (RuntimeError, OSError) as error:
            observed.wrong += 1
            observed.errors = [*observed.errors[:9], str(error)]
            connection.close()
            active.discard(connection)
            connection = None
            await asyncio.sleep(0.05)
            continue
        active.discard(connection)
        observed.answers += 1
        if connection.tokens != plan.tokens:
            observed.wrong += 1
            observed.errors = [*observed.errors[:9], f"{connection.tokens} tokens"]
        if started_s + plan.warm_s <= connection.end_s:
            observed.first_s.append(connection.first_s - connection.sent_s)
            observed.total_s.append(connection.end_s - connection.sent_s)
        if plan.think_s:
            await asyncio.sleep(rng.expovariate(1 / plan.think_s))
    if connection is not None:
        connection.close()


async def main(plan: Plan) -> Observed:
    observed = Observed()
    request = request_of(plan)
    gc.disable()
    before_s = time.process_time()
    started_s = time.perf_counter()
    active: set[Client] = set()
    await asyncio.gather(*(client(plan, request, observed, started_s, active) for _ in range(plan.clients)))
    observed.seconds = time.perf_counter() - started_s
    observed.cpu_s = time.process_time() - before_s
    return observed


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(main(Plan(**json.load(sys.stdin)))))))
