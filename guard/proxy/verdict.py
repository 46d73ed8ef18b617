"""The policy's stage: wait for the readouts of the prompt, a bounded time, and decide.

Owns what makes detectors unavailable: readouts that are late, missing or garbled, and an engine that cannot read what
the policy asks for. Never acts on the decision.
"""

from __future__ import annotations

import asyncio
import json
import time

from guard.policy import BoundPolicy, Decision
from guard.proxy.answer import Answer, PlainAnswer
from guard.proxy.readouts import Finding
from guard.telemetry.record import RequestRecord


async def decide(
    policy: BoundPolicy, opening: asyncio.Task[Answer], record: RequestRecord, sent_s: float
) -> Decision | None:
    """The decision, put on the record too. None when there is nothing to judge: vLLM refused the request."""
    if not policy.spec.captures:
        record.decision = policy.decide({})
        return record.decision
    finding = await _find(policy, opening)
    if finding is None:
        return None
    if finding.readouts is not None:
        record.upstream_first_byte_s = finding.arrived_s - sent_s
        record.prompt_tokens = finding.readouts.prompt_tokens
    record.scores = policy.scores(finding.readouts, finding.reason)
    record.decision = policy.decide(record.scores)
    decided_s = time.perf_counter()
    record.verdict_s = decided_s - sent_s
    record.own_s += decided_s - finding.arrived_s
    return record.decision


async def _find(policy: BoundPolicy, opening: asyncio.Task[Answer]) -> Finding | None:
    try:
        async with asyncio.timeout(policy.hold_s or None):
            answer = await asyncio.shield(opening)
            if isinstance(answer, PlainAnswer) and answer.failed:
                refusal = await spec_refusal(answer)
                return None if refusal is None else Finding(None, f"the engine refuses: {refusal}")
            return await answer.find(patient=policy.enforces)
    except TimeoutError:
        return Finding(None, f"no readouts within {policy.hold_s:g} s")


async def spec_refusal(answer: Answer) -> str | None:
    """Why the aperture refuses what the guard asked for, None when that is not what the answer says."""
    if not isinstance(answer, PlainAnswer) or answer.status != 400:
        return None
    try:
        error = json.loads((await answer.whole()).body)["error"]
        return str(error["message"]) if error["code"] == "invalid_mia_spec" else None
    except (ValueError, LookupError, TypeError):
        return None
