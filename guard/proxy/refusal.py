"""A block that clients read as an answer: the policy's words, and that a filter ended it.

Owns that answer's facts; its shape is the API's (``wire``), with as many choices as were asked for: clients take the
first without looking.
"""

from __future__ import annotations

from typing import Any

from guard.proxy.body import GuardedRequest
from guard.proxy.exchange import JSON, Exchange
from guard.proxy.shown_items import ShownItems
from guard.proxy.wire import Ending, Form, compact

EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def ending(
    exchange: Exchange,
    request: GuardedRequest[Form],
    *,
    tokens: int = 0,
    first: dict[str, Any] | None = None,
    last: dict[str, Any] | None = None,
    items: ShownItems | None = None,
) -> Ending:
    """What an answer that ends here says. tokens: of the answer, as many as the client got."""
    record = exchange.record
    return Ending(
        record.request_id,
        request.model,
        request.form.choices(request.fields),
        request.wants_usage,
        # Of a request that nobody was sent there is nothing to count.
        0 if exchange.sent is None else record.prompt_tokens,
        tokens,
        first,
        last,
        items,
    )


async def refuse(exchange: Exchange, request: GuardedRequest[Form], text: str) -> None:
    """Send ``text`` as the whole answer of a request of whose own answer nothing was sent."""
    record, facts = exchange.record, ending(exchange, request)
    record.outcome = "blocked"
    if not request.streamed:
        return await exchange.respond(200, JSON, compact(request.form.refusal(facts, text)))
    await exchange.start(200, EVENT_STREAM)
    await exchange.end(request.form.refusal_stream(facts, text))
