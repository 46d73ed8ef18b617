"""Embeddings: nothing is generated and nothing is read inside the model, so only text is judged.

Owns this API's bodies and its stages. Of several texts or conversations each is a prompt of its own, and judged by
itself: roles and scopes are a conversation's, and many clean texts do not make up for one that is not. Detectors that
read the model are unavailable here, never clean: ``on_error`` decides.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from detectors.base import Score
from guard.policy import BoundPolicy, Decision, Judges
from guard.policy.judged_paths import EMBEDDINGS
from guard.policy.judges import Scores
from guard.policy.over_time import Seen
from guard.policy.schema import Action, Redaction, detectors_in
from guard.proxy.access import check_media_type
from guard.proxy.admission import judges_for
from guard.proxy.body import GuardedRequest, parsed
from guard.proxy.capturing import capturing_of
from guard.proxy.chat import as_decided, redactions_of
from guard.proxy.client_threads import TextThreads
from guard.proxy.errors import InvalidRequestError, RoutingError, SteeringError
from guard.proxy.exchange import Exchange
from guard.proxy.judging import joined, severity_of
from guard.proxy.readouts import Finding
from guard.proxy.relay import relay
from guard.proxy.replicas import affinity_of
from guard.proxy.services import Services
from guard.proxy.verdict import Judged, blocked, judged, note, note_scores, read_each
from guard.proxy.wire import AROUND, AS_TOKENS, Fields, Slot, Texts, around
from guard.proxy.wire_choices import PROMPT_ROLE, beside_texts, chat_form

NOT_READ = Finding(None, "the model is not read while it embeds")
STEERS: tuple[Action, ...] = ("steer", "retry")


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
)


async def prompts_of(request: GuardedRequest[Texts], threads: TextThreads) -> list[GuardedRequest[Texts]]:
    """A request for each prompt of it; itself where it has one."""
    name = _prompts_in(request.fields)
    if name is None:
        return [request]
    shown = {one: request.fields[one] for one in SHOWN if one in request.fields}
    return await threads.parse(
        lambda: [GuardedRequest(request.form, {**shown, name: one}).worked_out() for one in request.fields[name]]
    )


async def embeddings(services: Services, exchange: Exchange) -> None:
    """Raises ``ApiError`` or ``ClientGoneError`` for every end but an answer."""
    record, settings = exchange.record, services.settings
    exchange.need_method("POST")
    check_media_type(exchange.headers)
    raw = await exchange.read_body(settings.max_body_bytes, settings.body_timeout_s)
    began_s = record.began_s = time.perf_counter()
    threads = services.threads.of(exchange.caller.key_hash)
    request = await parsed(embeddings_form, raw, threads)
    record.model = request.model
    exchange.affinity = affinity_of(request.fields)
    judges = judges_for(services.policies, exchange, request.model)
    exchange.capturing = capturing_of(judges, request, record)
    found = await judged_each(judges, await prompts_of(request, threads), NOT_READ, exchange, threads)
    record.own_s = time.perf_counter() - began_s
    if record.decision is not None and record.decision.action == "block":
        raise blocked(record.decision)
    if steers := next((one.decision for one in found if one.decision.action in STEERS), None):
        raise SteeringError(f"rule {steers.rule} steers, which an embedding cannot be")
    request = await _as_decided(request, [one.decision for one in found], judges, threads)
    await request.written(threads)
    await exchange.until_client_leaves(_embed(services, exchange, request))


async def judged_each(
    judges: Judges,
    prompts: Sequence[GuardedRequest[Texts]],
    not_read: Finding,
    exchange: Exchange,
    threads: TextThreads,
) -> list[Judged]:
    """Each prompt by its texts alone, and what they come to together on the record. ``not_read``: why the model is not
    read."""
    texts = await read_each(judges, prompts, threads)

    def judge() -> tuple[list[Judged], Judged]:
        # Whatever a detector's scope, it is not the conversation that keeps it from reading.
        found = [
            judged(
                judges,
                judges.ask(one.roles, replace(one.form.unplaced(one.fields), whole=not_read.reason)),
                not_read,
                read,
            )
            for one, read in zip(prompts, texts.each, strict=True)
        ]
        return found, joined_of(judges, found)

    texts.again = lambda: note_scores(judges, judge()[1], exchange.record)
    exchange.afterwards.append(texts.settle)
    # Many take a while, and nobody else is to wait for it.
    found, together = judge() if len(prompts) == 1 else await threads.parse(judge)
    note(judges, together, exchange.record)
    # No gate can open.
    exchange.record.armed = ()
    return found


def joined_of(judges: Judges, found: Sequence[Judged]) -> Judged:
    """Of all prompts the worst decision, with the rules that hit in the others; of each detector the highest score, but
    of those that the decision rests on the ones that it was made on."""
    worst = max(found, key=lambda one: severity_of(one.decision))
    decision = joined(worst.decision, [one.decision for one in found])
    scores = _most(judges.live, worst.decision, worst.scores.live, [one.scores.live for one in found])
    would, beside = None, worst.scores.shadow
    if judges.shadow is not None:
        by_shadow = [(one.would, one.scores.shadow) for one in found if one.would is not None]
        worst_would, read = max(by_shadow, key=lambda one: severity_of(one[0]))
        would = joined(worst_would, [one for one, _ in by_shadow])
        beside = _most(judges.shadow, worst_would, read, [one for _, one in by_shadow])
    return Judged(worst.asked, Scores(scores, beside), decision, would)


def _most(
    policy: BoundPolicy, decision: Decision, rests_on: Mapping[str, Score], of_all: Sequence[Mapping[str, Score]]
) -> dict[str, Score]:
    seen = Seen()
    seen.add(of_all)
    decided = () if decision.rule is None else detectors_in(policy.rule(decision.rule))
    return {name: rests_on[name] if name in decided else one.counts for name, one in seen.whole.items()}


async def _as_decided(
    request: GuardedRequest[Texts], decisions: Sequence[Decision], judges: Judges, threads: TextThreads
) -> GuardedRequest[Texts]:
    """Each prompt as its own decision has it. Raises ``RoutingError`` where they are for several models."""
    models = {one.by.route.model for one in decisions if one.action == "route" and one.by and one.by.route}
    if len(models) > 1:
        raise RoutingError("rules route prompts of one request to several models; send one each")
    name = _prompts_in(request.fields)
    if name is None:
        return await as_decided(request, decisions[0], judges, threads)
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
