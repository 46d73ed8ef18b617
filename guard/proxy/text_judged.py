"""Requests of which only texts are judged: nothing is read inside the model, and each prompt is judged by itself.

Owns their first stages, from the body to the decisions. Detectors that read the model are unavailable here, never
clean: ``on_error`` decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from detectors.base import Score
from guard.policy import BoundPolicy, Decision, Judges
from guard.policy.judges import Scores
from guard.policy.over_time import Seen
from guard.policy.schema import Action, detectors_in
from guard.proxy.access import check_media_type
from guard.proxy.admission import judges_for
from guard.proxy.body import GuardedRequest, parsed
from guard.proxy.capturing import capturing_of
from guard.proxy.client_threads import TextThreads
from guard.proxy.exchange import Exchange
from guard.proxy.judging import joined, severity_of
from guard.proxy.readouts import Finding
from guard.proxy.replicas import affinity_of
from guard.proxy.services import Services
from guard.proxy.verdict import Judged, blocked, judged, note, note_scores, read_each
from guard.proxy.wire import Texts

Request = GuardedRequest[Texts]
STEERS: tuple[Action, ...] = ("steer", "retry")
"""What cannot be done to an answer that is no text."""


async def judged_by_texts(
    services: Services,
    exchange: Exchange,
    form: Texts,
    prompts_of: Callable[[Request], Sequence[Request]],
    not_read: Finding,
) -> tuple[Request, Judges, list[Decision]]:
    """The request, who judges it, and the decision on each of its prompts; the worst is the request's, and none blocks.
    ``not_read``: why the model is not read. Raises ``ApiError``."""
    record, settings = exchange.record, services.settings
    exchange.need_method("POST")
    check_media_type(exchange.headers)
    raw = await exchange.read_body(settings.max_body_bytes, settings.body_timeout_s)
    began_s = record.began_s = time.perf_counter()
    threads = services.threads.of(exchange.caller.key_hash)
    request = await parsed(form, raw, threads)
    record.model = request.model
    exchange.affinity = affinity_of(request.fields)
    judges = judges_for(services.policies, exchange, request.model)
    exchange.capturing = capturing_of(judges, request, record)
    prompts = prompts_of(request)
    if len(prompts) > 1:
        # Many take a while, here and below, and nobody else is to wait for it.
        await threads.parse(lambda: [one.worked_out() for one in prompts])
    found = await judged_each(judges, prompts, not_read, threads, exchange)
    record.own_s = time.perf_counter() - began_s
    if record.decision is not None and record.decision.action == "block":
        raise blocked(record.decision)
    return request, judges, [one.decision for one in found]


async def judged_each(
    judges: Judges,
    prompts: Sequence[Request],
    not_read: Finding,
    threads: TextThreads,
    exchange: Exchange | None = None,
) -> list[Judged]:
    """Each prompt by its texts alone, and what they come to together on the record of ``exchange``, where there is one.
    ``not_read``: why the model is not read."""
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

    found, together = judge() if len(prompts) == 1 else await threads.parse(judge)
    if exchange is not None:
        record = exchange.record
        texts.again = lambda: note_scores(judges, judge()[1], record)
        exchange.afterwards.append(texts.settle)
        note(judges, together, record)
        # No gate can open.
        record.armed = ()
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
