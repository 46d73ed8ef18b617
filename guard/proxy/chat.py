"""A chat request, stage by stage: who asks, what is asked, what the engine reads, what the policy says, what is done.

Owns the order of the stages and the actions. Each stage is a module of its own.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager

from guard.mia.spec import MiaSpec
from guard.policy import Decision
from guard.proxy.access import check_media_type
from guard.proxy.answer import Answer
from guard.proxy.body import ChatRequest, parse_chat_request
from guard.proxy.errors import BlockedError, GuardUnavailableError, SteeringError
from guard.proxy.exchange import Exchange
from guard.proxy.relay import relay
from guard.proxy.services import Services
from guard.proxy.verdict import decide, spec_refusal


async def chat(services: Services, exchange: Exchange) -> None:
    """Answer one chat request. Raises ``ApiError`` or ``ClientGoneError`` for every other end."""
    record, settings = exchange.record, services.settings
    services.access.check(exchange.headers)
    exchange.need_method("POST")
    check_media_type(exchange.headers)
    raw = await exchange.read_body(settings.max_body_bytes, settings.body_timeout_s)
    began_s = time.perf_counter()
    request = parse_chat_request(raw)
    record.model, record.streamed = request.model, request.streamed
    await exchange.until_client_leaves(_guarded(services, exchange, request, began_s))


async def _guarded(services: Services, exchange: Exchange, request: ChatRequest, began_s: float) -> None:
    """The answer that the policy wants."""
    policy, record = services.policy, exchange.record
    body = request.to_json(policy.spec if policy.spec.asks else None)
    sent_s = time.perf_counter()
    record.own_s = sent_s - began_s
    try:
        async with _ask(services, exchange, body, early=not request.streamed) as opening:
            decision = await decide(policy, opening, record, sent_s)
            if decision is None:
                return await relay(exchange, await opening)
            _refuse(decision)
            if not decision.steer and await spec_refusal(await opening) is None:
                return await relay(exchange, await opening)
        # Left, the first request is closed, and vLLM stops answering it.
        await _ask_again(services, exchange, request, policy.steered(decision) if decision.steer else None)
    finally:
        record.upstream_s = time.perf_counter() - sent_s


def _refuse(decision: Decision) -> None:
    """Raises for a decision to block; the client can tell a hit from a guard that could not measure."""
    if decision.action != "block":
        return
    blocking = next(hit for hit in decision.hits if hit.rule == decision.rule)
    if blocking.on_error:
        raise GuardUnavailableError(f"rule {blocking.rule} lets nothing pass that the guard cannot measure")
    raise BlockedError(f"{decision.message} (rule {blocking.rule})")


async def _ask_again(services: Services, exchange: Exchange, request: ChatRequest, spec: MiaSpec | None) -> None:
    """The answer is generated anew: steered, or without what the engine refused to read and the policy can spare."""
    async with _ask(services, exchange, request.to_json(spec), early=False) as opening:
        answer = await opening
        if refusal := await spec_refusal(answer):
            raise SteeringError(f"the engine cannot steer as the policy says: {refusal}")
        await relay(exchange, answer)


def _ask(
    services: Services, exchange: Exchange, body: bytes, *, early: bool
) -> AbstractAsyncContextManager[asyncio.Task[Answer]]:
    return services.upstream.ask(body, exchange.record.request_id, exchange.headers, early=early)
