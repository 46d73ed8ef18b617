"""Embeddings: nothing is generated and nothing is read inside the model, so only text is judged.

Owns this API's bodies and its stages. Detectors that read the model are unavailable here, never clean: ``on_error``
decides.
"""

from __future__ import annotations

import time
from dataclasses import replace

from guard.policy.schema import Action
from guard.proxy.access import check_media_type
from guard.proxy.admission import judges_for
from guard.proxy.body import GuardedRequest, parsed
from guard.proxy.capturing import capturing_of
from guard.proxy.chat import redacted_and_routed
from guard.proxy.errors import InvalidRequestError, SteeringError
from guard.proxy.exchange import Exchange
from guard.proxy.readouts import Finding
from guard.proxy.relay import relay
from guard.proxy.replicas import affinity_of
from guard.proxy.services import EMBEDDINGS, Services
from guard.proxy.verdict import blocked, judge, read_texts
from guard.proxy.wire import AS_TOKENS, Fields, Slot, Texts, around
from guard.proxy.wire_choices import chat_form

NOT_READ = Finding(None, "the model is not read while it embeds")
STEERS: tuple[Action, ...] = ("steer", "retry")


def _check(fields: Fields) -> None:
    if "messages" in fields and "input" in fields:
        # The engine embeds one of them; which, is not for the guard to guess.
        raise InvalidRequestError("give messages or input, not both", "input")
    if "messages" in fields:
        return chat_form.check(fields)
    given = fields.get("input")
    if not isinstance(given, str | list) or not given:
        raise InvalidRequestError("input must be a text or a list, and not empty", "input")
    for i, one in enumerate(given if isinstance(given, list) else ()):
        if isinstance(one, list) and not all(isinstance(token, int) for token in one):
            raise InvalidRequestError("several conversations cannot be guarded in one request; send one each", "input")
        if isinstance(one, dict) != isinstance(given[0], dict):
            raise InvalidRequestError(f"input[{i}] is of another kind than input[0]", f"input[{i}]")
        if isinstance(one, dict) and not isinstance(one.get("role"), str):
            raise InvalidRequestError(f"input[{i}].role must be a string", f"input[{i}].role")
    if (chat := _chat(fields)) is not None:
        chat_form.check(chat)


def _chat(fields: Fields) -> Fields | None:
    """The request as a chat's, where it has messages: under either name. They are the same objects."""
    if "messages" in fields:
        return fields
    given = fields["input"]
    return {**fields, "messages": given} if isinstance(given, list) and isinstance(given[0], dict) else None


def _slots(fields: Fields) -> list[Slot]:
    if (chat := _chat(fields)) is not None:
        return chat_form.slots(chat)
    given = fields["input"]
    if isinstance(given, str):
        return [Slot(0, 0, fields, "input")]
    return [Slot(0, i, given, i) for i, text in enumerate(given) if isinstance(text, str)]


def _beside(fields: Fields) -> list[Slot]:
    chat = _chat(fields)
    if chat is None:
        return around(fields)
    # In the request itself, not in the copy: what is redacted there is to be gone here.
    return [replace(slot, owner=fields) if slot.owner is chat else slot for slot in chat_form.beside(chat)]


def _roles(fields: Fields) -> tuple[str, ...]:
    chat = _chat(fields)
    return chat_form.roles(chat) if chat is not None else ("user",)


def _unread(fields: Fields) -> str:
    if (chat := _chat(fields)) is not None:
        return chat_form.unread(chat)
    given = fields["input"]
    texts = isinstance(given, str) or all(isinstance(one, str) for one in given)
    return "" if texts else AS_TOKENS


embeddings_form = Texts(
    route=EMBEDDINGS,
    check=_check,
    roles=_roles,
    slots=_slots,
    beside=_beside,
    unread=_unread,
)


async def embeddings(services: Services, exchange: Exchange) -> None:
    """Raises ``ApiError`` or ``ClientGoneError`` for every end but an answer."""
    record, settings = exchange.record, services.settings
    exchange.need_method("POST")
    check_media_type(exchange.headers)
    raw = await exchange.read_body(settings.max_body_bytes, settings.body_timeout_s)
    began_s = record.began_s = time.perf_counter()
    request = await parsed(embeddings_form, raw)
    record.model = request.model
    exchange.affinity = affinity_of(request.fields)
    judges = judges_for(services.policies, exchange, request.model)
    exchange.capturing = capturing_of(judges, request, record)
    asked, texts = judges.ask(request.roles), await read_texts(judges, request)
    decision = judge(judges, asked, NOT_READ, record, texts)
    # No gate can open.
    record.armed = ()
    record.own_s = time.perf_counter() - began_s
    if decision.action == "block":
        raise blocked(decision)
    if decision.action in STEERS:
        raise SteeringError(f"rule {decision.rule} steers, which an embedding cannot be")
    await exchange.until_client_leaves(_embed(services, exchange, redacted_and_routed(request, decision, judges)))


async def _embed(services: Services, exchange: Exchange, request: GuardedRequest[Texts]) -> None:
    sent_s, record = time.perf_counter(), exchange.record
    async with services.ask(request.form.route, request, None, exchange, early=False) as opening:
        try:
            await relay(exchange, await opening, lambda frame: False)
        finally:
            record.upstream_s = time.perf_counter() - sent_s
