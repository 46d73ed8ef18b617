"""vLLM's answer to the client, byte for byte, and what the record learns from it.

Owns the end of a stream: one that breaks off ends with an error frame, never silently, since clients take a missing end
for an end. Never decides anything.
"""

from __future__ import annotations

import json

from guard.proxy.answer import Answer, StreamedAnswer, Whole
from guard.proxy.errors import UpstreamError
from guard.proxy.exchange import Exchange
from guard.telemetry.record import RequestRecord

END_FRAME = b"data: [DONE]"
ERROR_FRAME = b'data: {"error"'
USAGE = b'"usage":{'


async def relay(exchange: Exchange, answer: Answer) -> None:
    if isinstance(answer, StreamedAnswer):
        await _relay_stream(exchange, answer)
    else:
        await relay_whole(exchange, await answer.whole())


async def relay_whole(exchange: Exchange, whole: Whole) -> None:
    exchange.record.outcome = "completed" if whole.status == 200 else "upstream_error"
    _count_tokens(exchange.record, whole.body)
    await exchange.respond(whole.status, whole.headers, whole.body)


async def _relay_stream(exchange: Exchange, answer: StreamedAnswer) -> None:
    last, usage, failed = b"", b"", False
    async for frames in answer.batches():
        if not exchange.started:
            # Not sooner: an engine that dies before its first frame is still a real status.
            await exchange.start(200, answer.headers)
        for last in frames:
            failed = failed or last.startswith(ERROR_FRAME)
            usage = last if USAGE in last else usage
        exchange.record.frames += len(frames)
        if frames:
            await exchange.stream(b"".join(frames))
    _count_tokens(exchange.record, usage.removeprefix(b"data: "))
    if not last.startswith(END_FRAME):
        raise UpstreamError("the model server's answer broke off")
    exchange.record.outcome = "upstream_error" if failed else "completed"
    await exchange.end()


def _count_tokens(record: RequestRecord, body: bytes) -> None:
    """What the usage of a JSON answer, or of a chunk, says."""
    if USAGE not in body:
        return
    try:
        usage = json.loads(body)["usage"]
        record.prompt_tokens = int(usage["prompt_tokens"])
        record.completion_tokens = int(usage["completion_tokens"])
    except (ValueError, LookupError, TypeError):
        return
