"""A request for an answer, stage by stage: who asks, what is asked, what the engine reads, what the policy says.

Owns the order of the stages and the actions. Each stage is a module of its own.
"""

from __future__ import annotations

import time
from asyncio import Task
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from guard.policy import Decision, Judges, Question
from guard.policy.measuring import Steering
from guard.policy.schema import Contract, Redaction
from guard.proxy.access import check_media_type
from guard.proxy.admission import judges_for
from guard.proxy.answer import Answer, PlainAnswer
from guard.proxy.body import F, GuardedRequest, parsed
from guard.proxy.capturing import capturing_of
from guard.proxy.client_threads import TextThreads
from guard.proxy.errors import RoutingError, SteeringError
from guard.proxy.exchange import Exchange
from guard.proxy.judged import block, relay_failed, relay_judged, settle_answer
from guard.proxy.judging import AnswerJudge, Conversation
from guard.proxy.readouts import Finding, gate_reports
from guard.proxy.recording import Handler
from guard.proxy.relay import relay
from guard.proxy.replicas import affinity_of
from guard.proxy.second_pass import AFFINITY, PassReader
from guard.proxy.services import Services
from guard.proxy.text_reading import Reading
from guard.proxy.usage import count_whole, left_at_prompt
from guard.proxy.verdict import ShadowRefusedError, decide, judge, read_texts, spec_refusal
from guard.proxy.window_passes import WindowPasses, window_passes
from guard.proxy.wire import Form
from guard.telemetry.record import RequestRecord

PASSES = ("allow", "flag")
UNREAD = Finding(None, "nothing was measured")
ANEW = Finding(None, "the engine sent no readouts with the new answer")


def answering(form: Form) -> Handler:
    """The handler of one API. It raises ``ApiError`` or ``ClientGoneError`` for every end but an answer."""

    async def handle(services: Services, exchange: Exchange) -> None:
        record, settings = exchange.record, services.settings
        exchange.named_errors = form.named_errors
        exchange.need_method("POST")
        check_media_type(exchange.headers)
        raw = await exchange.read_body(settings.max_body_bytes, settings.body_timeout_s)
        began_s = record.began_s = time.perf_counter()
        request = await parsed(form, raw, services.threads.of(exchange.caller.key_hash))
        record.model, record.streamed = request.model, request.streamed
        exchange.affinity = affinity_of(request.fields)
        judges = judges_for(services.policies, exchange, request.model)
        record.contract = Contract(judges.live.streaming, judges.live.window_tokens) if request.streamed else None
        exchange.capturing = capturing_of(judges, request, record)
        await exchange.until_client_leaves(guarded(services, exchange, request, judges, began_s))

    return handle


@dataclass(frozen=True)
class _Asking:
    """One request on its way through the stages."""

    services: Services
    exchange: Exchange
    request: GuardedRequest[Form]
    judges: Judges
    asked: Question
    texts: Reading
    sent_s: float

    @property
    def threads(self) -> TextThreads:
        """For the client's texts."""
        return self.services.threads.of(self.exchange.caller.key_hash)

    def send(self, *, early: bool) -> AbstractAsyncContextManager[Task[Answer]]:
        request = self.request
        return self.services.ask(request.form.route, request, self.asked.wire, self.exchange, early=early)

    def _conversation(self) -> Conversation:
        request = self.request
        said = request.said if self.judges.asking_again(self.asked) else ()
        return Conversation(said, request.roles, request.form.words, self._reader())

    def _reader(self, affinity: bytes = AFFINITY) -> PassReader:
        exchange = self.exchange
        return PassReader(
            self.services.upstream, self.request.model, exchange.record.request_id, exchange.passed, affinity
        )

    def windows(self) -> AbstractAsyncContextManager[WindowPasses | None]:
        """Their passes begin like the request itself, whose instruction a server may have cached."""
        if not self.judges.windowed:
            return nullcontext()
        request, reader = self.request, self._reader(self.exchange.affinity)
        return window_passes(self.judges, self.asked, request.said, request.roles, reader)

    async def pass_on(self, answer: Answer, finding: Finding, attempts: int = 0) -> Decision | None:
        """The answer to the client. A decision comes back when another answer is wanted first."""
        try:
            if not self.judges.judges_answers:
                await relay(self.exchange, answer, self.request.form.ends)
                return None
            if isinstance(answer, PlainAnswer) and answer.failed:
                await relay_failed(self.exchange, await answer.whole(), begun=False)
                return None
            judge = AnswerJudge(
                self.judges, self.asked, finding.readouts, finding.reason, self.threads, self._conversation()
            )
            self.exchange.afterwards.append(partial(settle_answer, self.exchange.record, judge, attempts))
            return await relay_judged(self.exchange, self.request, answer, judge, attempts)
        finally:
            if gated := self.asked.gated:
                self.exchange.record.gates = gate_reports(gated, answer.readouts())


async def guarded(
    services: Services, exchange: Exchange, request: GuardedRequest[Form], judges: Judges, began_s: float
) -> None:
    """The answer that the policy wants."""
    record, roles = exchange.record, request.roles
    unread = services.unread(request.model)
    asked = (
        judges.ask(roles, request.unplaced) if unread is None else judges.ask_unread(roles, unread, request.unplaced)
    )
    texts = await read_texts(judges, request, services.threads.of(exchange.caller.key_hash))
    exchange.afterwards.append(texts.settle)
    if unread is None and judges.cuts_streams and not asked.reads:
        # Readouts would tell how long the prompt is.
        request = request.counting()
    sent_s = time.perf_counter()
    record.own_s = sent_s - began_s
    try:
        first = _Asking(services, exchange, request, judges, asked, texts, sent_s)
        try:
            await _judged(first)
        except ShadowRefusedError as error:
            # What a shadow policy cannot have must not cost the live one its scores.
            alone = judges.ask_alone(roles, str(error), request.unplaced)
            await _judged(replace(first, asked=alone, sent_s=time.perf_counter()))
    finally:
        record.upstream_s = time.perf_counter() - sent_s


async def _judged(asking: _Asking) -> None:
    """First the prompt; the answer that began meanwhile is the client's when nothing else is decided."""
    record, request = asking.exchange.record, asking.request
    decision = None if asking.asked.reads else judge(asking.judges, asking.asked, UNREAD, record, asking.texts)
    unread = False
    if decision is None or decision.action in PASSES:
        await asking.request.written(asking.threads)
        async with asking.send(early=asking.asked.reads and not request.streamed) as opening:
            finding = UNREAD
            if decision is None:
                async with asking.windows() as windows:
                    decided = await decide(
                        asking.judges,
                        asking.asked,
                        opening,
                        record,
                        asking.sent_s,
                        asking.texts,
                        windows,
                        waits=_waits(asking),
                    )
                if decided is None:
                    await asking.pass_on(await opening, UNREAD)
                    return
                decision, finding, asked = decided
                asking = replace(asking, asked=asked)
            refusal = None
            if decision.action in PASSES or (decision.action != "block" and opening.done()):
                refusal = await spec_refusal(await opening)
                unread = refusal is not None
            if unread and asking.judges.only_beside and not asking.asked.reads:
                raise ShadowRefusedError(f"the engine refuses: {refusal}")
            if decision.action in PASSES and not unread:
                wanted = await asking.pass_on(await opening, finding)
                if wanted is None:
                    return
                decision = wanted
            else:
                await _left(asking.exchange.record, opening)
    else:
        left_at_prompt(record)
    # Left, the first request is closed, and vLLM stops answering it.
    if decision.action == "block":
        return await block(asking.exchange, request, decision)
    await _ask_again(asking, decision, unread)


async def _left(record: RequestRecord, opening: Task[Answer]) -> None:
    """The first request is left for what its prompt has in it; an answer that came whole meanwhile was generated."""
    answer = opening.result() if opening.done() and opening.exception() is None else None
    if isinstance(answer, PlainAnswer) and answer.read:
        whole = await answer.whole()
        count_whole(record, whole.body) if whole.status == 200 else left_at_prompt(record)
    else:
        left_at_prompt(record)


def _waits(asking: _Asking) -> bool:
    return not asking.request.streamed or asking.judges.live.streaming != "observe"


async def _ask_again(asking: _Asking, decision: Decision, unread: bool) -> None:
    """The answer is generated anew, as often as the policy says: steered, redacted, by another model; or without what
    the engine refused to read and the policy can spare (``unread``)."""
    attempts: Counter[str] = Counter()
    if decision.by is not None and decision.by.stage == "output":
        attempts[decision.by.name] = 1
        _keep_earlier(asking.exchange.record)
    judges, request = asking.judges, asking.request
    steerings: Sequence[Steering] = judges.live.armed
    while True:
        if decision.steer:
            steerings = judges.live.steerings_for(decision)
        elif unread and decision.action in PASSES:
            steerings = asking.exchange.record.armed = ()
        request = await as_decided(request, decision, judges, asking.threads)
        asked = judges.ask_again(request.roles, steerings, request.unplaced)
        if reason := asking.services.unread(request.model):
            if decision.steer:
                raise SteeringError(f"rule {decision.rule} steers, which this model cannot be: {reason}")
            asked = judges.ask_unread(request.roles, reason, request.unplaced)
            asking.exchange.record.armed = ()
        elif unread:
            asked = replace(asked, spec=judges.live.steering_spec(steerings, request.roles))
        again = replace(asking, request=request, asked=asked)
        await again.request.written(again.threads)
        async with again.send(early=False) as opening:
            answer = await opening
            if refusal := await spec_refusal(answer):
                raise SteeringError(f"the engine cannot steer as the policy says: {refusal}")
            if decision.action == "route" and isinstance(answer, PlainAnswer) and answer.status == 404:
                raise RoutingError(f"rule {decision.rule} routes to a model that the engine does not serve")
            wanted = await again.pass_on(answer, ANEW, attempts.total())
        if wanted is None:
            return
        rule = wanted.by
        assert rule is not None, "only a rule that hit asks for another answer"
        if attempts[rule.name] >= rule.attempts:
            return await _give_up(asking, wanted)
        attempts[rule.name] += 1
        _keep_earlier(asking.exchange.record)
        decision = wanted


def _keep_earlier(record: RequestRecord) -> None:
    """What was made of the answer that another one is to take the place of."""
    if record.answer is not None:
        record.earlier += (record.answer,)


async def _give_up(asking: _Asking, wanted: Decision) -> None:
    """No other answer is left to try."""
    record = asking.exchange.record
    blocked = replace(wanted, action="block", reason=f"{wanted.reason}, and again in every answer that was tried")
    if record.answer is not None:
        record.answer = replace(record.answer, decision=blocked)
    await block(asking.exchange, asking.request, blocked)


def redactions_of(decision: Decision, judges: Judges) -> list[Redaction]:
    """What rules take out of a request."""
    rules = [judges.live.rule(hit.rule) for hit in decision.hits if hit.action == "redact" and hit.mode == "enforce"]
    return [rule.redact for rule in rules if rule.stage == "prompt" and rule.redact is not None]


def redacted_and_routed(request: GuardedRequest[F], decision: Decision, judges: Judges) -> GuardedRequest[F]:
    """The request with everything that rules redact in it, for the model that a rule routes to."""
    if redactions := redactions_of(decision, judges):
        request = request.redacted(redactions)
    if decision.action == "route" and decision.by is not None and decision.by.route is not None:
        request = request.routed(decision.by.route.model)
    return request


async def as_decided(
    request: GuardedRequest[F], decision: Decision, judges: Judges, threads: TextThreads
) -> GuardedRequest[F]:
    """The same; in a thread where all of the request is copied."""
    if not redactions_of(decision, judges):
        return redacted_and_routed(request, decision, judges)
    return await threads.parse(lambda: redacted_and_routed(request, decision, judges).worked_out())
