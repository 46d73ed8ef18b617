"""An engine without a model: answers chat requests in vLLM's wire forms, readouts included, as a whole or as a stream.

    python -m bench.proxy.stub_engine PORT [--tokens-per-s 20000] [--taps JSON]

Owns its HTTP, as little of it as the proxies under test speak, so that it costs a few microseconds a token. Like an
engine that batches, it makes one token for every stream in each step; steps come as often as ``--tokens-per-s`` for all
streams together allows. Whole answers come at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from functools import cache
from typing import cast

import numpy as np
import uvloop

from guard.mia.results import (
    EVENT_OBJECT,
    AttentionReadout,
    HiddenMeanReadout,
    HiddenReadout,
    ProbeReadout,
    Readout,
    Readouts,
)
from guard.mia.spec import MiaSpec

HIDDEN_SIZE = 576
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
EARLY = re.compile(rb"(?i)\r\nx-mia-early: *1")
HEAD = b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: "
STREAM_HEAD = HEAD + b"text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EARLY_HEAD = HEAD + b"application/x-ndjson\r\nx-mia-early: 1\r\ntransfer-encoding: chunked\r\n\r\n"
ENVELOPE = b'{"readouts": [], "status": 200, "headers": {"content-type": "application/json"}}\n'
MODELS = b'{"object":"list","data":[{"id":"stub","object":"model"}]}'
CAPABILITIES = b"/v1/mia/capabilities"
LAST_CHUNK = b"0\r\n\r\n"
MIN_STEP_S = 0.001


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def frame(delta: str, finish: str) -> bytes:
    return chunked(
        b'data: {"id":"chatcmpl-8f14e45fceea167a5a36dedd4bea2543","object":"chat.completion.chunk",'
        b'"created":1796000000,"model":"stub","choices":[{"index":0,"delta":%b,"logprobs":null,'
        b'"finish_reason":%b,"token_ids":null}]}\n\n' % (delta.encode(), finish.encode())
    )


FIRST = frame('{"role":"assistant","content":""}', "null")
TOKEN = frame('{"content":" word"}', "null")
STOP = frame('{"content":""}', '"stop"')
USAGE = chunked(
    b'data: {"id":"chatcmpl-8f14e45fceea167a5a36dedd4bea2543","object":"chat.completion.chunk","created":1796000000,'
    b'"model":"stub","choices":[],"usage":{"prompt_tokens":40,"total_tokens":104,"completion_tokens":64}}\n\n'
)
DONE = chunked(b"data: [DONE]\n\n")


@cache
def whole(tokens: int) -> bytes:
    answer = {
        "id": "chatcmpl-8f14e45fceea167a5a36dedd4bea2543",
        "object": "chat.completion",
        "created": 1796000000,
        "model": "stub",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " word" * tokens, "tool_calls": []},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 40, "total_tokens": 40 + tokens, "completion_tokens": tokens},
    }
    return json.dumps(answer, separators=(",", ":")).encode()


@cache
def event_of(asked: str) -> bytes:
    """The readouts that a spec asks for, as an engine sends them: every number 0, which no detector minds."""
    spec = MiaSpec.model_validate_json(asked)
    items: dict[str, Readout] = {}
    for name, hidden in spec.hidden.items():
        state = np.zeros(HIDDEN_SIZE, np.float32)
        if hidden.average:
            items[name] = HiddenMeanReadout("complete", hidden.layer, ((8, 39),), state)
        else:
            items[name] = HiddenReadout("complete", hidden.layer, 39, 198, state)
    for name, probe in spec.probes.items():
        items[name] = ProbeReadout("complete", probe.probe, (39,), (198,), np.zeros((1, 1), np.float32))
    for name, attention in spec.attention.items():
        heads = tuple(attention.heads)
        mass = {span: np.full(len(heads), 0.5, np.float32) for span in attention.spans}
        items[name] = AttentionReadout("complete", heads, (39,), (198,), mass)
    readouts = Readouts(items, prompt_tokens=40).to_wire()
    return json.dumps({"object": EVENT_OBJECT, "readouts": [readouts]}).encode()


class Engine:
    """All streams of the process, one token each in every step."""

    def __init__(self, tokens_per_s: float, taps: str) -> None:
        self.tokens_per_s = tokens_per_s
        self.capabilities = b'{"object":"mia.capabilities","taps":' + taps.encode() + b"}"
        self.left: dict[Connection, int] = {}
        self._awake = asyncio.Event()

    def begin(self, stream: Connection, tokens: int) -> None:
        self.left[stream] = tokens
        self._awake.set()

    async def run(self) -> None:
        due_s = time.perf_counter()
        while True:
            if not self.left:
                self._awake.clear()
                await self._awake.wait()
                due_s = time.perf_counter()
            for stream, tokens in list(self.left.items()):
                if tokens:
                    self.left[stream] = tokens - 1
                    stream.write(TOKEN)
                else:
                    del self.left[stream]
                    stream.write(STOP + (USAGE if stream.wants_usage else b"") + DONE + LAST_CHUNK)
            # What a late step missed is made up for by the next ones, as long as that is little.
            due_s = max(due_s + max(MIN_STEP_S, len(self.left) / self.tokens_per_s), time.perf_counter() - 0.05)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.wants_usage = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none by class.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.left.pop(self, None)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[: end + 2]
            length = LENGTH.search(head)
            total = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < total:
                return
            body, self._buffer = self._buffer[end + 4 : total], self._buffer[total:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if not body:
            text = self._engine.capabilities if CAPABILITIES in head else MODELS
            return self.write(HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
        fields = json.loads(body)
        tokens = int(fields["max_tokens"])
        asked = (fields.get("vllm_xargs") or {}).get("mia")
        event = event_of(asked) if asked else None
        if fields.get("stream"):
            self.wants_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
            readouts = chunked(b"data: " + event + b"\n\n") if event else b""
            self.write(STREAM_HEAD + readouts + FIRST)
            return self._engine.begin(self, tokens)
        answer = whole(tokens)
        if event is not None and EARLY.search(head):
            return self.write(EARLY_HEAD + chunked(event + b"\n") + chunked(ENVELOPE + answer) + LAST_CHUNK)
        self.write(HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
        return None


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--tokens-per-s", type=float, default=20_000)
    parser.add_argument("--taps", default="null", help="JSON of the taps that it says it has")
    options = parser.parse_args()
    engine = Engine(options.tokens_per_s, options.taps)
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Connection(engine), "127.0.0.1", options.port, backlog=4096)
    print("ready", flush=True)
    await engine.run()


if __name__ == "__main__":
    uvloop.run(main())
