"""A chat request, stage by stage: who asks, what is asked, what the engine reads, what the policy says, what is done.

Owns the order of the stages and the actions. Each stage is a module of its own.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager

from guard.mia.spec import MiaSpec
from guard.policy import Decision, Judges, Question
from guard.proxy.access import check_media_type
from guard.proxy.admission import judges_for
from guard.proxy.answer import Answer
from guard.proxy.body import ChatRequest, parse_chat_request
from guard.proxy.errors import BlockedError, GuardUnavailableError, SteeringError
from guard.proxy.exchange import Exchange
from guard.proxy.refusal import refuse
from guard.proxy.relay import relay
from guard.proxy.replicas import affinity_of
from guard.proxy.services import Services
from guard.proxy.verdict import ShadowRefusedError, decide, spec_refusal


async def chat(services: Services, exchange: Exchange) -> None:
    """Answer one chat request. Raises ``ApiError`` or ``ClientGoneError`` for every other end."""
    record, settings = exchange.record, services.settings
    exchange.need_method("POST")
    check_media_type(exchange.headers)
    raw = await exchange.read_body(settings.max_body_bytes, settings.body_timeout_s)
    began_s = time.perf_counter()
    request = parse_chat_request(raw)
    record.model, record.streamed = request.model, request.streamed
    exchange.affinity = affinity_of(request.fields)
    judges = judges_for(services.policies, exchange, request.model)
    await exchange.until_client_leaves(_guarded(services, exchange, request, judges, began_s))


async def _guarded(
    services: Services, exchange: Exchange, request: ChatRequest, judges: Judges, began_s: float
) -> None:
    """The answer that the policy wants."""
    record, asked = exchange.record, judges.ask(request.roles)
    sent_s = time.perf_counter()
    record.own_s = sent_s - began_s
    try:
        try:
            await _judged(services, exchange, request, judges, asked)
        except ShadowRefusedError as error:
            # What a shadow policy cannot have must not cost the live one its scores.
            await _judged(services, exchange, request, judges, judges.ask_alone(request.roles, str(error)))
    finally:
        record.upstream_s = time.perf_counter() - sent_s


async def _judged(
    services: Services, exchange: Exchange, request: ChatRequest, judges: Judges, asked: Question
) -> None:
    sent_s = time.perf_counter()
    body = request.to_json(asked.spec if asked.spec.asks else None)
    async with _ask(services, exchange, body, early=not request.streamed) as opening:
        decision = await decide(judges, asked, opening, exchange.record, sent_s)
        if decision is None:
            return await relay(exchange, await opening)
        again = decision.action == "block" or decision.steer or await spec_refusal(await opening) is not None
        if not again:
            return await relay(exchange, await opening)
    # Left, the first request is closed, and vLLM stops answering it.
    if decision.action == "block":
        return await _block(exchange, request, decision)
    await _ask_again(
        services, exchange, request, judges.live.steered(decision, request.roles) if decision.steer else None
    )


async def _block(exchange: Exchange, request: ChatRequest, decision: Decision) -> None:
    """Raises, unless the policy wants an answer; the client can tell a hit from a guard that could not measure."""
    if decision.by is None:
        raise GuardUnavailableError(f"rule {decision.rule} lets nothing pass that the guard cannot measure")
    if decision.by.respond == "error":
        raise BlockedError(f"{decision.message} (rule {decision.rule})")
    await refuse(exchange, request, decision.message)


async def _ask_again(services: Services, exchange: Exchange, request: ChatRequest, spec: MiaSpec | None) -> None:
    """The answer is generated anew: steered, or without what the engine refused to read and the policy can spare."""
    if spec is None:
        exchange.record.armed = ()
    async with _ask(services, exchange, request.to_json(spec), early=False) as opening:
        answer = await opening
        if refusal := await spec_refusal(answer):
            raise SteeringError(f"the engine cannot steer as the policy says: {refusal}")
        await relay(exchange, answer)


def _ask(
    services: Services, exchange: Exchange, body: bytes, *, early: bool
) -> AbstractAsyncContextManager[asyncio.Task[Answer]]:
    return services.upstream.ask(
        body, exchange.record.request_id, exchange.headers, early=early, affinity=exchange.affinity
    )
