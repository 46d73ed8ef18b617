"""The policy's stage: wait for the readouts of the prompt, a bounded time, and decide.

Owns what makes detectors unavailable: readouts that are late, missing or garbled, and an engine that cannot read what
the policy asks for. Never acts on the decision.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from detectors.base import Score
from guard.policy import Decision, Judges, Question
from guard.policy.judges import PROMPT, Scores
from guard.policy.measuring import Measurement, at_least
from guard.policy.way import way_of
from guard.proxy.answer import Answer, PlainAnswer, Whole
from guard.proxy.body import GuardedRequest
from guard.proxy.client_threads import TextThreads
from guard.proxy.errors import ApiError, BlockedError, GuardUnavailableError
from guard.proxy.readouts import Finding
from guard.proxy.text_reading import LATE, Reader, Reading, read_by_each
from guard.proxy.window_passes import WindowPasses
from guard.proxy.wire import Texts
from guard.telemetry.record import Beside, RequestRecord

TextScores = Mapping[str, Score]
"""Scores of detectors that read text, by key."""


class ShadowRefusedError(Exception):
    """The engine cannot read what was asked, of which a part is the shadow policy's alone. The message says why."""


def blocked(decision: Decision) -> ApiError:
    """The error that a block is: the client can tell a hit from a guard that could not measure."""
    if decision.by is None:
        return GuardUnavailableError(f"rule {decision.rule} lets nothing pass that the guard cannot measure")
    return BlockedError(f"{decision.message} (rule {decision.rule})")


async def read_texts(judges: Judges, request: GuardedRequest[Texts], threads: TextThreads) -> Reading:
    """Scores of the detectors that read the prompt's text. Raises ``ApiError`` where it gets no turn."""
    return await read_each(judges, [request], threads)


async def read_each(judges: Judges, requests: Sequence[GuardedRequest[Texts]], threads: TextThreads) -> Reading:
    """The same of several prompts, each detector in one bounded time for all."""
    readers = judges.readers(PROMPT)
    if not readers:
        return Reading([{} for _ in requests])
    # What is missing of a prompt is so in time and out of time.
    late = [Score("unavailable", reason=why) if (why := one.unread) else LATE for one in requests]
    if not any(map(_readable, requests)):
        return Reading([dict.fromkeys((one.key for one in readers), missing) for missing in late])
    works = {one.key: Reader(partial(_read_by, one, requests, late), judges.wait_for(one, PROMPT)) for one in readers}
    return await read_by_each(works, late, sum(one.characters for one in requests), threads)


def _read_by(reader: Measurement, requests: Sequence[GuardedRequest[Texts]], missing: Sequence[Score]) -> list[Score]:
    return [_read(reader, one) if _readable(one) else without for one, without in zip(requests, missing, strict=True)]


def _readable(request: GuardedRequest[Texts]) -> bool:
    """Whether there is anything to read, be it the text of nothing."""
    return bool(request.texts) or not request.unread


def _read(reader: Measurement, request: GuardedRequest[Texts]) -> Score:
    """The score of what is there; where there is more it is what the whole has at least."""
    score = reader.score_prompt(request.texts, request.roles)
    return at_least(score, request.unread) if request.unread else score


async def decide(
    judges: Judges,
    asked: Question,
    opening: asyncio.Task[Answer],
    record: RequestRecord,
    sent_s: float,
    texts: Reading,
    windows: WindowPasses | None,
    *,
    waits: bool,
) -> tuple[Decision, Finding, Question] | None:
    """The decision, put on the record too, and what it rests on. None when there is nothing to judge: vLLM refused the
    request. Unless it ``waits``, what is not there before the answer counts as missing.

    Raises ``ShadowRefusedError``.
    """
    hold_s = judges.hold_s(asked) if waits else 0.0
    finding = await _find(judges, asked, opening, hold_s)
    if finding is None:
        return None
    if windows is not None:
        # Whoever has windows read waits for them: a score without them is one of another detector.
        limit_s = sent_s + (hold_s or judges.live.prompt_timeout_s) - time.perf_counter() if waits else 0.0
        asked = await windows.answered(asked, max(0.0, limit_s), record)
    ready_s = time.perf_counter() if windows is not None else finding.arrived_s
    if finding.readouts is not None:
        record.upstream_first_byte_s = finding.arrived_s - sent_s
        record.prompt_tokens = finding.readouts.prompt_tokens
    decision = judge(judges, asked, finding, record, texts)
    decided_s = time.perf_counter()
    record.verdict_s = decided_s - sent_s
    record.own_s += decided_s - ready_s
    return decision, finding, asked


@dataclass(frozen=True)
class Judged:
    """What the policies make of one prompt. ``would``: the shadow's decision, None without one."""

    asked: Question
    scores: Scores
    decision: Decision
    would: Decision | None


def judge(judges: Judges, asked: Question, finding: Finding, record: RequestRecord, texts: Reading) -> Decision:
    """The decision on a prompt, put on the record too, and again when its last texts have been read. ``texts``: of one
    prompt."""

    def again() -> None:
        note_scores(judges, judged(judges, asked, finding, texts.each[0]), record)

    texts.again = again
    found = judged(judges, asked, finding, texts.each[0])
    note(judges, found, record)
    return found.decision


def judged(judges: Judges, asked: Question, finding: Finding, texts: TextScores) -> Judged:
    """The decisions on a prompt."""
    scores = judges.scores(asked, finding.readouts, finding.reason, timed_out=finding.timed_out, texts=texts)
    return Judged(asked, scores, *judges.decide(scores))


def note(judges: Judges, found: Judged, record: RequestRecord) -> None:
    """Put on the record what a prompt was judged by."""
    note_scores(judges, found, record)
    record.decided_s = time.perf_counter()
    record.armed = found.asked.armed


def note_scores(judges: Judges, found: Judged, record: RequestRecord) -> None:
    """The same without when."""
    record.scores, record.measured, record.decision = found.scores.live, judges.live.digests, found.decision
    record.prompt_way = way_of(judges.live.rules, found.decision)
    if found.would is not None and judges.shadow is not None:
        shadow = judges.shadow
        record.shadow = Beside(shadow.name, shadow.hash, found.scores.shadow, shadow.digests, found.would)


async def _find(judges: Judges, asked: Question, opening: asyncio.Task[Answer], hold_s: float) -> Finding | None:
    # Scores that nobody acts on are worth recording, and not worth waiting for.
    limit_s = hold_s or judges.live.prompt_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            answer = await asyncio.shield(opening)
            if isinstance(answer, PlainAnswer) and answer.failed:
                return await _refused(judges, asked, answer)
            return await answer.find(patient=hold_s > 0)
    except TimeoutError:
        return Finding(None, f"no readouts within {limit_s:g} s", timed_out=True)


async def _refused(judges: Judges, asked: Question, answer: PlainAnswer) -> Finding | None:
    refusal = await spec_refusal(answer)
    if refusal is None:
        return None
    if any(key not in asked.known for key in judges.only_beside):
        raise ShadowRefusedError(f"the engine refuses: {refusal}")
    return Finding(None, f"the engine refuses: {refusal}")


async def spec_refusal(answer: Answer) -> str | None:
    """Why the aperture refuses what the guard asked for, None when that is not what the answer says."""
    if not isinstance(answer, PlainAnswer) or answer.status != 400:
        return None
    return spec_refusal_of(await answer.whole())


def spec_refusal_of(whole: Whole) -> str | None:
    """The same of an answer that is complete."""
    if whole.status != 400:
        return None
    try:
        error = json.loads(whole.body)["error"]
        return str(error["message"]) if error["code"] == "invalid_mia_spec" else None
    except (ValueError, LookupError, TypeError):
        return None
