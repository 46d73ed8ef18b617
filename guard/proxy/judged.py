"""An answer that rules judge, to the client: as fast as its policy's contract allows, and no part that a rule forbids.

Owns when a token is released, and how an answer ends that is blocked: by status as long as nothing has left, by its
last frames afterwards.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

from guard.policy import Decision
from guard.proxy.answer import Answer, StreamedAnswer, Whole
from guard.proxy.body import GuardedRequest
from guard.proxy.error_frame import EngineError, error_body, error_frame, refusal_body
from guard.proxy.errors import UpstreamError
from guard.proxy.exchange import JSON, Exchange
from guard.proxy.judging import AnswerJudge, Ruling, Unit
from guard.proxy.refusal import ending, refuse
from guard.proxy.relay import broke_off, relay_whole
from guard.proxy.shown_items import ShownItems
from guard.proxy.usage import came, count_event, count_readouts, count_whole
from guard.proxy.verdict import blocked
from guard.proxy.wire import DATA, Form, Frame, answer_json, compact, frames_of
from guard.proxy.wire_choices import DONE_FRAME, hide_token_ids
from guard.proxy.withholding import Withheld
from guard.telemetry.record import Answered, RequestRecord

FRAMES_AT_ONCE = 256
"""Frames of a stream that are written before others have their turn."""

ERROR: Unit = (0, "error")
"""Where a model server's error is kept, for those who may keep texts."""


async def relay_judged(
    exchange: Exchange, request: GuardedRequest[Form], answer: Answer, judge: AnswerJudge, attempts: int
) -> Decision | None:
    """Answer the client. A decision comes back when it wants another answer first; then nothing was sent."""
    exchange.record.course = judge.course
    if isinstance(answer, StreamedAnswer):
        try:
            return await _Stream(exchange, request, answer, judge, attempts).run()
        finally:
            # However it ended: what rules made of it until then.
            exchange.record.answer = judge.answered(attempts) or exchange.record.answer
    return await _whole(exchange, request, await answer.whole(), judge, attempts)


async def settle_answer(record: RequestRecord, judge: AnswerJudge, attempts: int, limit_s: float) -> None:
    """Put on the record what detectors that nobody waited for say of an answer, within so many seconds after it."""
    told = judge.answered(attempts)
    has_more = await judge.settle(limit_s)
    new = judge.answered(attempts)
    if new is None or not has_more:
        return

    def with_more(one: Answered) -> Answered:
        if told is None or one.attempts != attempts:
            return one
        # What was made of it in the end may be another decision.
        return replace(new, decision=new.decision if one.decision is told.decision else one.decision)

    record.earlier = tuple(with_more(one) for one in record.earlier)
    record.answer = new if record.answer is None else with_more(record.answer)


async def block(exchange: Exchange, request: GuardedRequest[Form], decision: Decision) -> None:
    """Before the first byte. Raises, unless the policy wants an answer."""
    if decision.by is None or decision.by.respond == "error":
        raise blocked(decision)
    await refuse(exchange, request, decision.message)


async def _whole(
    exchange: Exchange, request: GuardedRequest[Form], whole: Whole, judge: AnswerJudge, attempts: int
) -> Decision | None:
    if whole.status != 200:
        # The head of such an answer came behind the readouts of its prompt.
        await relay_failed(exchange, whole, begun=True)
        return None
    count_whole(exchange.record, whole.body)
    frame = _one_frame(request, whole)
    judge.add(frame)
    ruling = await judge.check(whole.readouts(), complete=True)
    exchange.record.answer = judge.answered(attempts)
    if ruling.decision.action in ("retry", "route", "block"):
        exchange.withhold(judge.texts)
    if ruling.decision.action in ("retry", "route"):
        return ruling.decision
    if ruling.decision.action == "block":
        await block(exchange, request, ruling.decision)
        return None
    judge.redact(frame)
    body = compact(frame.data) if frame.changed else whole.body
    # It was judged as that; another name would have clients read it in another way.
    await relay_whole(exchange, Whole(whole.status, {**whole.headers, **JSON}, body))
    return None


async def relay_failed(exchange: Exchange, whole: Whole, *, begun: bool) -> None:
    """An error in place of an answer that rules would have judged. One about the request keeps its words, and nothing
    beside them; a fault of the model server, and whatever comes once the answer has ``begun``, may quote what the model
    wrote."""
    error = error_body(whole.body)
    told = error.told if begun or whole.status >= 500 else refusal_body(whole.body)
    if told != whole.body:
        exchange.withhold({ERROR: error.said})
        whole = replace(whole, headers={**whole.headers, **JSON}, body=told)
    await relay_whole(exchange, whole)


def _one_frame(request: GuardedRequest[Form], whole: Whole) -> Frame:
    """The whole answer as one event. Raises ``UpstreamError``."""
    try:
        data: Any = answer_json(whole.body)
        hidden = hide_token_ids(request.fields, data)
        return Frame(whole.body, data, None, request.form.pieces(data), changed=hidden)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UpstreamError("the model server's answer cannot be read") from None


@dataclass
class _Stream:
    exchange: Exchange
    request: GuardedRequest[Form]
    answer: StreamedAnswer
    judge: AnswerJudge
    attempts: int
    withheld: Withheld = field(default_factory=Withheld)
    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    items: ShownItems = field(default_factory=ShownItems)
    released_tokens: int = 0

    async def run(self) -> Decision | None:
        live = self.judge.judges.live
        contract = live.streaming if live.holds_answers else "observe"
        end, error = b"", None
        async for batch in self.answer.batches():
            for raw in batch:
                end, error = raw, error_frame(raw)
                if error is not None:
                    came(self.exchange.record, raw)
                    break
                await self._take(raw)
            if contract == "observe":
                await self._release(self.withheld.due(self.judge.tokens, 0))
            if self.judge.judges_streams and batch:
                ruling = await self._check(complete=False)
                if ruling.decision.action == "block":
                    await self._block(ruling.decision)
                    return None
            if contract == "window":
                await self._release(self.withheld.due(self.judge.tokens, live.window_tokens))
            if error is not None:
                await self._fail(error)
                return None
        if not self.request.form.ends(end):
            raise broke_off()
        self.exchange.record.complete = True
        ruling = await self._check(complete=True)
        self.exchange.record.answer = self.judge.answered(self.attempts)
        if ruling.decision.action in ("retry", "route"):
            self.exchange.withhold(self.judge.texts)
            return ruling.decision
        if ruling.decision.action == "block":
            await self._block(ruling.decision)
            return None
        await self._release(self.withheld.rest())
        self.exchange.record.outcome = "completed"
        await self.exchange.end()
        return None

    async def _check(self, *, complete: bool) -> Ruling:
        readouts = self.answer.readouts()
        count_readouts(self.exchange.record, readouts)
        return await self.judge.check(readouts, complete=complete)

    async def _fail(self, error: EngineError) -> None:
        """The model server gave up: whatever it may send after it is no answer, and what is withheld was not judged to
        its end, and never will be."""
        exchange, record = self.exchange, self.exchange.record
        exchange.withhold({ERROR: error.said})
        record.complete, record.outcome = True, "upstream_error"
        if not exchange.started:
            await exchange.start(200, self.answer.headers)
        await exchange.end(error.told + (DONE_FRAME if self.request.form.ends(DONE_FRAME) else b""))

    async def _take(self, raw: bytes) -> None:
        if not raw.startswith(DATA) and all(line.startswith(b":") for line in raw.splitlines() if line):
            # A comment says nothing, and keeps connections open.
            if self.exchange.started:
                await self.exchange.stream(raw)
            return
        record = self.exchange.record
        came(record, raw)
        for frame in frames_of(self.request.form, raw):
            frame.changed |= hide_token_ids(self.request.fields, frame.data)
            self.judge.add(frame)
            self.withheld.add(frame)
            record.seen_tokens += frame.tokens
            count_event(record, frame.data)
            if self.request.counted and frame.data is not None and frame.data.get("choices"):
                frame.changed |= frame.data.pop("usage", None) is not None

    async def _release(self, frames: list[Frame]) -> None:
        if not frames:
            return
        if not self.exchange.started:
            await self.exchange.start(200, self.answer.headers)
        held_s = time.perf_counter() - min(frame.came_s for frame in frames)
        self.exchange.record.held_s = max(held_s, self.exchange.record.held_s or 0.0)
        for i in range(0, len(frames), FRAMES_AT_ONCE):
            await self.exchange.stream(b"".join(map(self._released, frames[i : i + FRAMES_AT_ONCE])))
            # Of an answer that was held there may be many thousands.
            await asyncio.sleep(0)

    def _released(self, frame: Frame) -> bytes:
        """A frame as the client gets it."""
        self.judge.redact(frame)
        self.released_tokens += frame.tokens
        self.first = self.first or frame.data
        self.last = frame.data or self.last
        if self.request.form.has_items and frame.data is not None:
            self.items.add(frame.data)
        return frame.to_bytes()

    async def _block(self, decision: Decision) -> None:
        exchange, record = self.exchange, self.exchange.record
        exchange.withhold(self.judge.texts)
        record.answer = self.judge.answered(self.attempts)
        if not exchange.started:
            await block(exchange, self.request, decision)
            return
        if decision.by is None:
            raise blocked(decision)
        record.outcome = "blocked"
        facts = ending(
            exchange, self.request, tokens=self.released_tokens, first=self.first, last=self.last, items=self.items
        )
        await exchange.end(self.request.form.cut(facts))
