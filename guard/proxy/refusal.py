"""A block that clients read as an answer: the policy's words, and ``finish_reason`` ``content_filter``.

Owns that answer in both forms, with as many choices as were asked for: clients take the first without looking.
"""

from __future__ import annotations

import json
import time
from typing import Any

from guard.proxy.body import ChatRequest
from guard.proxy.exchange import JSON, Exchange

MAX_CHOICES = 128
"""Most that are answered, where no engine has checked the number yet."""

EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8"}
FINISH = "content_filter"


async def refuse(exchange: Exchange, request: ChatRequest, text: str) -> None:
    """Send ``text`` as the whole answer of a request that was blocked before its first token."""
    record = exchange.record
    record.outcome, record.completion_tokens = "blocked", 0
    head = {"id": f"chatcmpl-{record.request_id}", "created": int(time.time()), "model": request.model}
    usage = {"prompt_tokens": record.prompt_tokens or 0, "completion_tokens": 0}
    usage["total_tokens"] = usage["prompt_tokens"]
    choices = range(min(request.choices, MAX_CHOICES))
    if not request.streamed:
        message = {"role": "assistant", "content": text}
        answer = {
            **head,
            "object": "chat.completion",
            "choices": [_choice(i, message=message, finish_reason=FINISH) for i in choices],
            "usage": usage,
        }
        return await exchange.respond(200, JSON, json.dumps(answer).encode())
    chunk = {**head, "object": "chat.completion.chunk"}
    said = {"role": "assistant", "content": text}
    chunks = [{**chunk, "choices": [_choice(i, delta=said, finish_reason=None)]} for i in choices]
    chunks += [{**chunk, "choices": [_choice(i, delta={}, finish_reason=FINISH)]} for i in choices]
    if request.wants_usage:
        chunks.append({**chunk, "choices": [], "usage": usage})
    await exchange.start(200, EVENT_STREAM)
    frames = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in chunks)
    await exchange.end(frames + b"data: [DONE]\n\n")


def _choice(index: int, **fields: Any) -> dict[str, Any]:
    return {"index": index, **fields, "logprobs": None}
