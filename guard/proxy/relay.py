"""vLLM's answer to the client, byte for byte, and what the record learns from it.

Owns the end of a stream: one that breaks off ends with an error frame, never silently, since clients take a missing end
for an end. Never decides anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from guard.proxy.answer import Answer, StreamedAnswer, Whole
from guard.proxy.error_frame import error_frame
from guard.proxy.errors import ModelNotFoundError, UpstreamError
from guard.proxy.exchange import Exchange
from guard.proxy.usage import count_frame, count_whole, expect_nothing

NOT_FOUND = ("NotFoundError", "not_found_error")
"""How vLLM calls the error, in OpenAI's form and in Anthropic's."""


async def relay(exchange: Exchange, answer: Answer, ends: Callable[[bytes], bool]) -> None:
    """``ends``: whether a frame is a stream's last."""
    if isinstance(answer, StreamedAnswer):
        await _relay_stream(exchange, answer, ends)
    else:
        await relay_whole(exchange, await answer.whole())


async def relay_whole(exchange: Exchange, whole: Whole) -> None:
    """Raises ``ModelNotFoundError`` in place of the model server's own words for that, which have no code for it."""
    if exchange.sent is not None and _says_no_such_model(whole):
        expect_nothing(exchange.record)
        raise ModelNotFoundError("no such model; GET /v1/models lists them", "model")
    exchange.record.outcome = "completed" if whole.status == 200 else "upstream_error"
    if whole.status == 200:
        count_whole(exchange.record, whole.body)
    else:
        expect_nothing(exchange.record)
    await exchange.respond(whole.status, whole.headers, whole.body)


def _says_no_such_model(whole: Whole) -> bool:
    """A 404 may also be a route that the model server does not have."""
    if whole.status != 404:
        return False
    try:
        error = json.loads(whole.body)["error"]
        return error.get("param") == "model" or error.get("type") in NOT_FOUND
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


async def _relay_stream(exchange: Exchange, answer: StreamedAnswer, ends: Callable[[bytes], bool]) -> None:
    last, failed = b"", False
    async for frames in answer.batches():
        if not exchange.started:
            # Not sooner: an engine that dies before its first frame is still a real status.
            await exchange.start(200, answer.headers)
        for last in frames:
            failed = failed or error_frame(last) is not None
            count_frame(exchange.record, last)
            exchange.record.frames += 1
        if frames:
            await exchange.stream(b"".join(frames))
    if not ends(last):
        raise broke_off()
    exchange.record.complete = True
    exchange.record.outcome = "upstream_error" if failed else "completed"
    await exchange.end()


def broke_off() -> UpstreamError:
    return UpstreamError("the model server's answer broke off")
