"""Embeddings: nothing is generated and nothing is read inside the model, so only text is judged.

Owns this API's bodies and its stages. Of several texts or conversations each is a prompt of its own, and judged by
itself: roles and scopes are a conversation's, and many clean texts do not make up for one that is not. Detectors that
read the model are unavailable here, never clean: ``on_error`` decides.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from guard.policy import Decision, Judges
from guard.policy.judged_paths import EMBEDDINGS
from guard.policy.schema import Redaction
from guard.proxy.body import GuardedRequest
from guard.proxy.chat import as_decided as one_as_decided
from guard.proxy.chat import redactions_of
from guard.proxy.client_threads import TextThreads
from guard.proxy.errors import InvalidRequestError, RoutingError, SteeringError
from guard.proxy.exchange import Exchange
from guard.proxy.readouts import Finding
from guard.proxy.relay import relay
from guard.proxy.services import Services
from guard.proxy.shown_texts import AROUND, AS_TOKENS, around, documents_unplaced
from guard.proxy.text_judged import STEERS, judged_by_texts
from guard.proxy.wire import Fields, Slot, Texts
from guard.proxy.wire_choices import PROMPT_ROLE, beside_texts, chat_form

NOT_READ = Finding(None, "the model is not read while it embeds")
MAX_PROMPTS = 2048
"""Most texts or conversations of one request, as OpenAI has it for texts: each is judged by itself."""

MAX_REPEATED, MAX_REPEATED_VALUES = 4_000_000, 400_000
"""Most characters, and most values however short, of what templates may show beside a prompt, such as tools, in all
prompts together: each may have them, and so each is judged with them."""

SHOWN = ("model", *AROUND)
"""Fields of which texts of a prompt are made beside its own. Others are not copied, or looked at, for each."""


def _check(fields: Fields) -> None:
    if "messages" in fields and "input" in fields:
        # The engine embeds one of them; which, is not for the guard to guess.
        raise InvalidRequestError("give messages or input, not both", "input")
    if (name := _conversations_in(fields)) is not None:
        _check_conversations(fields, name)
        return _check_number(fields, name)
    if "messages" in fields:
        return chat_form.check(fields)
    given = fields.get("input")
    if not isinstance(given, str | list) or not given:
        raise InvalidRequestError("input must be a text or a list, and not empty", "input")
    for i, one in enumerate(given if isinstance(given, list) else ()):
        if isinstance(one, list) and not (one and all(isinstance(token, int) for token in one)):
            raise InvalidRequestError(f"input[{i}] must be a list of tokens or of messages, not empty", f"input[{i}]")
        if isinstance(one, dict) != isinstance(given[0], dict):
            raise InvalidRequestError(f"input[{i}] is of another kind than input[0]", f"input[{i}]")
        if isinstance(one, dict) and not isinstance(one.get("role"), str):
            raise InvalidRequestError(f"input[{i}].role must be a string", f"input[{i}].role")
    for chat in _chats(fields):
        chat_form.check(chat)
    if _prompts_in(fields):
        _check_number(fields, "input")


def _prompts_in(fields: Fields) -> str | None:
    """The field that is a list of prompts; None where there is one prompt."""
    given = fields.get("input")
    if isinstance(given, list) and all(isinstance(one, str | list) for one in given):
        return "input"
    return _conversations_in(fields)


def _conversations_in(fields: Fields) -> str | None:
    """The field that is a list of conversations, each a list of messages; None where neither is."""
    for name in ("messages", "input"):
        given = fields.get(name)
        lists = [one for one in given if isinstance(one, list)] if isinstance(given, list) else []
        if lists and (name == "messages" or any(isinstance(inner, dict) for one in lists for inner in one)):
            return name
    return None


def _check_conversations(fields: Fields, name: str) -> None:
    for i, messages in enumerate(fields[name]):
        where = f"{name}[{i}]"
        if not isinstance(messages, list):
            raise InvalidRequestError(f"{where} must be a list of messages, as others are", where)
        try:
            chat_form.check({"messages": messages})
        except InvalidRequestError as error:
            place = (error.param or "messages").removeprefix("messages")
            raise InvalidRequestError(f"{where}: {error}", where + place) from None


def _check_number(fields: Fields, name: str) -> None:
    prompts = len(fields[name])
    if prompts > MAX_PROMPTS:
        raise InvalidRequestError(f"{name} has {prompts} entries; at most {MAX_PROMPTS} are taken", name)
    repeated = (
        ("characters", prompts * sum(len(slot.text) for slot in around(fields)), MAX_REPEATED),
        ("values", prompts * _values_in([fields.get(one) for one in AROUND if one in fields]), MAX_REPEATED_VALUES),
    )
    for what, number, most in repeated:
        if number > most:
            raise InvalidRequestError(
                f"what stands beside the prompts has {number} {what} in all of them; at most {most} are taken: send "
                "fewer at once",
                name,
            )


def _values_in(value: Any) -> int:
    """How many there are, at any depth."""
    found, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            found += len(one)
            waiting += one.values() if isinstance(one, dict) else one
    return found


def _chats(fields: Fields) -> list[Fields]:
    """The request as chats', where it has messages, under either name and in several lists or one. The messages are the
    same objects."""
    shown = {name: fields[name] for name in SHOWN if name in fields}
    if (name := _conversations_in(fields)) is not None:
        return [{**shown, "messages": messages} for messages in fields[name]]
    if "messages" in fields:
        return [fields]
    given = fields["input"]
    return [{**shown, "messages": given}] if isinstance(given, list) and isinstance(given[0], dict) else []


def _numbered(fields: Fields, slots: Callable[[Fields], list[Slot]]) -> list[Slot]:
    """Slots inside the messages of all its chats, which are counted on."""
    found: list[Slot] = []
    number = 0
    for chat in _chats(fields):
        found += [replace(slot, message=slot.message + number) for slot in slots(chat)]
        number += len(chat["messages"])
    return found


def _slots(fields: Fields) -> list[Slot]:
    if _chats(fields):
        return _numbered(fields, chat_form.slots)
    given = fields["input"]
    if isinstance(given, str):
        return [Slot(0, 0, fields, "input")]
    return [Slot(0, i, given, i) for i, text in enumerate(given) if isinstance(text, str)]


def _beside(fields: Fields) -> list[Slot]:
    # What is in no message is there once, in the request itself: what is redacted in a copy would still be in it.
    return _numbered(fields, beside_texts) + around(fields)


def _roles(fields: Fields) -> tuple[str, ...]:
    return tuple(role for chat in _chats(fields) for role in chat_form.roles(chat)) or (PROMPT_ROLE,)


def _unread(fields: Fields) -> str:
    if chats := _chats(fields):
        return next((why for chat in chats if (why := chat_form.unread(chat))), "")
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
    unplaced=documents_unplaced,
)


def prompts_of(request: GuardedRequest[Texts]) -> list[GuardedRequest[Texts]]:
    """A request for each prompt of it; itself where it has one."""
    name = _prompts_in(request.fields)
    if name is None:
        return [request]
    shown = {one: request.fields[one] for one in SHOWN if one in request.fields}
    return [GuardedRequest(request.form, {**shown, name: one}) for one in request.fields[name]]


async def embeddings(services: Services, exchange: Exchange) -> None:
    """Raises ``ApiError`` or ``ClientGoneError`` for every end but an answer."""
    request, judges, decisions = await judged_by_texts(services, exchange, embeddings_form, prompts_of, NOT_READ)
    if steers := next((one for one in decisions if one.action in STEERS), None):
        raise SteeringError(f"rule {steers.rule} steers, which an embedding cannot be")
    threads = services.threads.of(exchange.caller.key_hash)
    request = await as_decided(request, decisions, judges, threads)
    await request.written(threads)
    await exchange.until_client_leaves(_embed(services, exchange, request))


async def as_decided(
    request: GuardedRequest[Texts], decisions: Sequence[Decision], judges: Judges, threads: TextThreads
) -> GuardedRequest[Texts]:
    """Each prompt as its own decision has it. Raises ``RoutingError`` where they are for several models."""
    models = {one.by.route.model for one in decisions if one.action == "route" and one.by and one.by.route}
    if len(models) > 1:
        raise RoutingError("rules route prompts of one request to several models; send one each")
    name = _prompts_in(request.fields)
    if name is None:
        return await one_as_decided(request, decisions[0], judges, threads)
    each = [redactions_of(one, judges) for one in decisions]
    if any(each):
        request = await threads.parse(partial(_redacted_each, request, name, each))
    return request.routed(models.pop()) if models else request


def _redacted_each(
    request: GuardedRequest[Texts], name: str, each: Sequence[Sequence[Redaction]]
) -> GuardedRequest[Texts]:
    """All is copied once, however many prompts there are."""
    fields = copy.deepcopy(request.fields)
    shown = {one: fields[one] for one in SHOWN if one in fields}
    for i, redactions in enumerate(each):
        if redactions:
            shown[name] = fields[name][i]
            GuardedRequest(request.form, shown).redact(redactions)
            fields[name][i] = shown[name]
    return replace(request, fields={**fields, **shown, name: fields[name]})


async def _embed(services: Services, exchange: Exchange, request: GuardedRequest[Texts]) -> None:
    sent_s, record = time.perf_counter(), exchange.record
    async with services.ask(request.form.route, request, None, exchange, early=False) as opening:
        try:
            await relay(exchange, await opening, lambda frame: False)
        finally:
            record.upstream_s = time.perf_counter() - sent_s
