"""vLLM's answer to the client, byte for byte, and what the record learns from it.

Owns the end of a stream: one that breaks off ends with an error frame, never silently, since clients take a missing end
for an end. Never decides anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from guard.proxy.answer import Answer, StreamedAnswer, Whole
from guard.proxy.errors import UpstreamError
from guard.proxy.exchange import Exchange
from guard.telemetry.record import RequestRecord

ERROR_FRAMES = (b'data: {"error"', b"event: error")
USAGE = b'"usage":{'
OPENAI_NAMES, OTHER_NAMES = ("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")


async def relay(exchange: Exchange, answer: Answer, ends: Callable[[bytes], bool]) -> None:
    """``ends``: whether a frame is a stream's last."""
    if isinstance(answer, StreamedAnswer):
        await _relay_stream(exchange, answer, ends)
    else:
        await relay_whole(exchange, await answer.whole())


async def relay_whole(exchange: Exchange, whole: Whole) -> None:
    exchange.record.outcome = "completed" if whole.status == 200 else "upstream_error"
    count_tokens(exchange.record, whole.body)
    await exchange.respond(whole.status, whole.headers, whole.body)


async def _relay_stream(exchange: Exchange, answer: StreamedAnswer, ends: Callable[[bytes], bool]) -> None:
    last, usage, failed = b"", b"", False
    async for frames in answer.batches():
        if not exchange.started:
            # Not sooner: an engine that dies before its first frame is still a real status.
            await exchange.start(200, answer.headers)
        for last in frames:
            failed = failed or last.startswith(ERROR_FRAMES)
            usage = last if USAGE in last else usage
        exchange.record.frames += len(frames)
        if frames:
            await exchange.stream(b"".join(frames))
    count_tokens(exchange.record, usage)
    if not ends(last):
        raise broke_off()
    exchange.record.outcome = "upstream_error" if failed else "completed"
    await exchange.end()


def broke_off() -> UpstreamError:
    return UpstreamError("the model server's answer broke off")


def count_tokens(record: RequestRecord, body: bytes) -> None:
    """What the usage of a JSON answer, or of a chunk, says."""
    if USAGE not in body:
        return
    try:
        value = json.loads(body.rpartition(b"data: ")[2])
        usage = value["usage"] if "usage" in value else value["response"]["usage"]
        names = (
            ("prompt_tokens", "completion_tokens") if "prompt_tokens" in usage else ("input_tokens", "output_tokens")
        )
        record.prompt_tokens, record.completion_tokens = (int(usage.get(name, 0)) for name in names)
    except (ValueError, LookupError, TypeError):
        return
