"""What is known about one request: filled by the stages, read once at its end by ledger and metrics.

Owns the fields of a ledger entry and their units. Holds no text of a prompt or an answer. Never does I/O.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from detectors.base import Score
from guard.policy import Decision, RuleHit
from guard.policy.over_time import Spread
from guard.policy.schema import SEVERITY, Contract
from guard.policy.waits import Waits
from guard.policy.way import way_of

Outcome = Literal[
    "completed",
    "blocked",
    "refused",
    "guard_unavailable",
    "upstream_error",
    "upstream_unavailable",
    "upstream_broken",
    "client_gone",
    "stopped",
    "internal_error",
]
"""How a request ended. ``refused``: by access control, by a limit, or for what it says. ``guard_unavailable``: a rule
that blocks ``on_error`` got no score. ``upstream_error``: vLLM answered with an error, which was passed on.
``upstream_broken``: its answer ended too early. ``stopped``: the proxy was told to stop."""

LimitScope = Literal["key", "tenant", "everybody"]
LimitKind = Literal["requests", "tokens", "concurrent"]

Malformed = Literal["not_http", "head_too_large", "repeated_header"]
"""Why what came over a connection is no request, and so has no record."""

MAX_MODEL_CHARACTERS = 128


@dataclass(frozen=True)
class Beside:
    """What a shadow policy made of the request. ``measured``: detector -> what its score depends on, short."""

    policy: str
    policy_hash: str
    scores: Mapping[str, Score]
    measured: Mapping[str, str]
    decision: Decision


@dataclass(frozen=True)
class Answered:
    """What was made of the answer. ``choice``: the one that decided; ``scores``: of each detector the highest, of all
    its texts and all the times that it was judged.

    ``shadow``: what the shadow policy made of the same; None where it has no rules for answers. ``attempts``: how often
    the answer was generated again. ``second_pass_s``: how long detectors had the model read about it; None where none
    did. ``complete``: it was judged to its end; ``times``: how often it was judged. ``whole``, ``end``: all scores of a
    detector, and those at the end. ``met``: by rule that hit, the scores that it hit on; not in the ledger.
    """

    choice: int
    scores: Mapping[str, Score]
    decision: Decision
    shadow: Answered | None
    attempts: int
    second_pass_s: float | None = None
    complete: bool = True
    times: int = 1
    whole: Mapping[str, Spread] = field(default_factory=dict)
    end: Mapping[str, Spread] = field(default_factory=dict)
    met: Mapping[str, Mapping[str, Score]] = field(default_factory=dict)


@dataclass(frozen=True)
class GateReport:
    """What a steering rule's gate did in the engine. choices: of how many it was told. opened: in how many it opened.
    first_at: position of the first token that was steered, None when it stayed shut. reason: why it could not open."""

    choices: int
    opened: int
    first_at: int | None
    reason: str


@dataclass(frozen=True)
class Moment:
    """What rules of the stage ``stream`` had to go by at one time. ``tokens``: of the answer so far; scores: of its
    worst text, None where there is none yet."""

    tokens: int
    scores: Mapping[str, float | None]


@dataclass
class RequestRecord:
    """One request. Times ending in ``_s`` are seconds of ``time.perf_counter`` or durations in seconds. Tokens are
    those that the model server read and generated, whatever the client got of them, None while unknown; ``complete``:
    its answer came to its end; ``earlier_tokens``: of answers before; ``most_``: charged for what stays unknown.
    ``frames``: of a streamed answer, that came; ``frame_tokens``: their tokens at most, of which each has
    ``most_frame_tokens`` at most, 0 for as many as their text; ``seen_tokens``: those that say something, where each
    has one token.
    ``held_s``: longest time that rules kept a part of a stream back.
    ``window_passes``: how many windows of the prompt were read once more, and how long that took.
    ``prompt_way``: how the decision on the prompt is carried out.
    ``contract``: what its policy says of streams, where it is one; ``waits``: how long it waits for
    scores. ``limit``: whose, and which, refused it.
    ``earlier``: answers that were generated again. ``count``: how many requests it stands for. ``passed``: the path
    that the operator lets pass. ``course``: how a stream's scores went; ``provider``: whose model was asked last, and
    ``answered_by`` what it calls itself: these three are not in the ledger. When: ``began_s`` its body was read,
    ``sent_s`` it was first sent upstream,
    ``decided_s`` there was a decision on the prompt."""

    route: str
    policy: str
    policy_hash: str
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    client_request_id: str | None = None
    passed: str | None = None
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    started_s: float = field(default_factory=time.perf_counter)
    key: str | None = None
    tenant: str | None = None
    model: str | None = None
    provider: str | None = None
    answered_by: str | None = None
    streamed: bool = False
    contract: Contract | None = None
    waits: Waits | None = None
    assignment: str | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)
    measured: Mapping[str, str] = field(default_factory=dict)
    decision: Decision | None = None
    prompt_way: str = ""
    armed: tuple[str, ...] = ()
    gates: Mapping[str, GateReport] = field(default_factory=dict)
    shadow: Beside | None = None
    answer: Answered | None = None
    earlier: tuple[Answered, ...] = ()
    course: Sequence[Moment] = ()
    outcome: Outcome = "internal_error"
    error_code: str | None = None
    limit: tuple[LimitScope, LimitKind] | None = None
    count: int = 1
    status: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    complete: bool = False
    earlier_tokens: int = 0
    most_prompt_tokens: int = 0
    most_completion_tokens: int = 0
    frames: int = 0
    frame_tokens: int = 0
    most_frame_tokens: int = 1
    seen_tokens: int = 0
    began_s: float | None = None
    sent_s: float | None = None
    decided_s: float | None = None
    own_s: float = 0.0
    held_s: float | None = None
    verdict_s: float | None = None
    window_passes: int = 0
    window_passes_s: float | None = None
    upstream_first_byte_s: float | None = None
    upstream_s: float | None = None
    total_s: float | None = None

    @property
    def tokens(self) -> int:
        """Of prompt and answer, as limits count them, with those of answers that a policy had generated again. What
        nobody told is bounded: a stream has about one for each frame that came, a whole answer what it might have;
        another provider's has as many as its text."""
        prompt = self.most_prompt_tokens if self.prompt_tokens is None else self.prompt_tokens
        completion = self.generated_tokens or 0
        if not self.complete or self.completion_tokens is None:
            completion = max(completion, self.frame_tokens, self.most_completion_tokens)
        return self.earlier_tokens + prompt + completion

    @property
    def generated_tokens(self) -> int | None:
        """Of the answer: what the model server told of it, else of a stream what came. None where neither is known, as
        of frames that may have several tokens each."""
        if self.completion_tokens is not None and self.complete:
            return self.completion_tokens
        seen = self.seen_tokens if self.frames and self.most_frame_tokens == 1 else None
        return max((one for one in (self.completion_tokens, seen) if one is not None), default=None)

    @property
    def model_told(self) -> str | None:
        """The model that the client named, as far as it is told."""
        return self.model[:MAX_MODEL_CHARACTERS] if self.model is not None else None

    @property
    def answers(self) -> tuple[Answered, ...]:
        """All answers that were judged, in order: those that another one took the place of, then the last."""
        last = () if self.answer is None else (self.answer,)
        return (*(one for one in self.earlier if one is not self.answer), *last)

    @property
    def shadow_decisions(self) -> list[Decision]:
        """Of the policy in shadow, on the prompt and on each answer."""
        both = [self.shadow, *(one.shadow for one in self.answers)]
        return [one.decision for one in both if one is not None]

    @property
    def shadow_action(self) -> str:
        """What the shadow policy would have done, of all these the most severe; ``none`` without one."""
        return max((one.action for one in self.shadow_decisions), key=lambda one: SEVERITY[one], default="none")

    @property
    def shadow_hits(self) -> tuple[RuleHit, ...]:
        """Of its rules, each once."""
        return _worst_of_each(self.shadow_decisions)

    @property
    def action(self) -> str:
        """What was decided; ``none`` when it did not come to a decision."""
        decision = self.deciding
        return decision.action if decision else "none"

    @property
    def deciding(self) -> Decision | None:
        """Of the decisions on the prompt and on all answers the most severe one: an answer that was asked for anew is
        no less a ``retry`` when the new one is clean."""
        return max(self._decisions, key=lambda one: SEVERITY[one.action], default=None)

    @property
    def hits(self) -> tuple[RuleHit, ...]:
        """Of the rules for prompt and answers, each once, as it hit worst."""
        return _worst_of_each(self._decisions)

    @property
    def _decisions(self) -> list[Decision]:
        prompt = [] if self.decision is None else [self.decision]
        return prompt + [one.decision for one in self.answers]

    @property
    def rules(self) -> list[str]:
        """Names of the enforced rules that hit. One that could not be judged and lets pass has not."""
        return [hit.rule for hit in self.hits if hit.mode == "enforce" and hit.action != "allow"]

    def to_entry(self) -> dict[str, Any]:
        """The ledger's line; ``ENTRY_FIELDS`` says what each field means."""
        decision = self.deciding
        return {
            "time": self.started_at.isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "count": self.count,
            "client_request_id": self.client_request_id,
            "route": self.route,
            "passed": self.passed,
            "key": self.key,
            "tenant": self.tenant,
            "model": self.model_told,
            "streamed": self.streamed,
            "contract": asdict(self.contract) if self.contract else None,
            "waits": self.waits.json if self.waits else None,
            "policy": self.policy,
            "policy_hash": self.policy_hash,
            "assignment": self.assignment,
            "action": self.action,
            "would": decision.would if decision else "none",
            "rule": decision.rule if decision else None,
            "reason": decision.reason if decision else None,
            "rules": self.rules,
            "hits": [_hit(hit) for hit in self.hits],
            "prompt_action": self.decision.action if self.decision else "none",
            "prompt_way": self.prompt_way,
            "armed": list(self.armed),
            "gates": {rule: asdict(report) for rule, report in self.gates.items()},
            **_scores(self.scores, self.measured),
            "shadow": _beside(self.shadow) if self.shadow else None,
            "answer": self._answer_entry(self.answer) if self.answer else None,
            "outcome": self.outcome,
            "error_code": self.error_code,
            "status": self.status,
            "captured": None,
            "tokens": {"prompt": self.prompt_tokens, "completion": self.generated_tokens, "charged": self.tokens},
            "window_passes": self.window_passes,
            "timings_ms": {
                "total": _ms(self.total_s),
                "own": _ms(self.own_s),
                "verdict": _ms(self.verdict_s),
                "window_passes": _ms(self.window_passes_s),
                "upstream_first_byte": _ms(self.upstream_first_byte_s),
                "upstream": _ms(self.upstream_s),
            },
        }

    def _answer_entry(self, answer: Answered) -> dict[str, Any]:
        beside = self.shadow.measured if self.shadow else {}
        return {
            "attempts": answer.attempts,
            "second_pass_ms": _ms(answer.second_pass_s),
            **_answered(answer, self.measured, beside),
            "earlier": [_answered(one, self.measured, beside) for one in self.answers[:-1]],
        }


ENTRY_FIELDS: Mapping[str, str] = {
    "time": "When the request came, UTC.",
    "request_id": "Also the response header x-guard-request-id, and what vLLM was given; new each time.",
    "count": "How many requests the entry stands for: 1, or, of requests that were refused for their key or by a limit "
    "and were too many in a minute, all of a route that have no entry of their own; time is then the first one's.",
    "client_request_id": "What the client sent as x-request-id if that was short and plain; null otherwise.",
    "route": "Path, or other.",
    "passed": "Of route other the path, where it is one of passed_paths; null otherwise.",
    "key": "Id of the API key; null when none is asked for, or it was refused.",
    "tenant": "Tenant of the key; null without one.",
    "model": "The model that the client named.",
    "streamed": "Whether it asked for a stream.",
    "contract": "What its policy says of streams: streaming, window_tokens; null where it is none.",
    "waits": "How long, in seconds, its policy waits for each detector: prompt, and answer, each time that it is "
    "judged; null where none was chosen.",
    "policy": "Name of the policy that judged it; of a request that was refused before one was chosen, the default.",
    "policy_hash": "SHA-256 of the policy's content.",
    "assignment": "The assignment of selection.yaml that chose the policy; null for its default.",
    "action": "allow, flag, redact, steer, retry, route or block, of the prompt and all answers the most severe: retry "
    "and route of stage output stay when the answer after them was clean; none when it did not come to a decision.",
    "would": "The action if shadow rules were enforced too.",
    "rule": "The rule that decided.",
    "reason": "Its condition, with the scores.",
    "rules": "All enforced rules that hit, on answers before the last one too.",
    "hits": "Rules that hit or could not be judged, shadow rules too, each with its reason.",
    "prompt_action": "What the rules for prompts alone decided.",
    "prompt_way": "Hash of what was done by that: vectors, messages and replacement, model, gated steerings, an answer "
    "in the policy's words; empty where nothing was. Replay compares it.",
    "armed": "Rules whose gated steering went with the request: the engine opened it, or not.",
    "gates": "What the engine told of each gate by its rule, at the end of the answer: choices, in how many it opened, "
    "first_at (position of the first token that was steered), reason why it could not open. Nothing of a rule whose "
    "answer did not come to its end.",
    "scores": "Score of each detector; null when there is none.",
    "detectors": "scored, with a reason where the score may be higher; or unavailable or not_applicable and why.",
    "timed_out": "Detectors that are unavailable because their score did not come in time.",
    "details": "Of detectors that say more than their score: numbers by name, such as the probability of each label.",
    "passages": "Of detectors that say where in the prompt: token ranges [start, end) and their share of what the "
    "detector looks at, the largest share first.",
    "measured": "What each score depends on, as KIND@HASH+FILE: HASH of what the policy says of the detector, FILE of "
    "what its calibration computes scores from, thresholds aside; without FILE where there is none. Scores compare "
    "where these are the same.",
    "shadow": "What the shadow policy beside would have done: policy, policy_hash, action, rule, reason, hits, scores, "
    "detectors, timed_out, details, passages, measured, all as above; null without one.",
    "answer": "What rules of the stages stream and output made of the answer: the choice that decided, action, rule, "
    "reason, way (as prompt_way); scores, detectors, timed_out, details, "
    "passages, measured, where a score is the highest that the detector "
    "gave any of its texts at any time while it grew; over_time, of detectors that said more than one thing of it: "
    "lowest, highest, without (what stood there instead of a score), timed_out; at_end, the same of the last time that "
    "it was judged, where that differs; complete, whether that was its end; times, how often it was judged; how many "
    "attempts there were to generate it again, and earlier, the same of the answers before; what the shadow policy "
    "would have done (would), on what (shadow: as above; null where it has no rules for answers), and how long "
    "detectors had the model read about it (second_pass_ms); null when no rule judges answers, or there was none.",
    "outcome": "How the request ended.",
    "error_code": "error.code of the proxy's own error answer.",
    "status": "HTTP status that was sent; null when none was.",
    "captured": "Of the text that the policy had kept, outside the ledger: expires, the last day on which it is, and "
    "the SHA-256 of its line; null where none was.",
    "tokens": "Tokens of prompt and completion that the model server told, whatever the client got; of a stream that "
    "told none, about as many as its frames with a text in them that came; null where unknown; charged, what limits "
    "count: with those of answers that a policy had generated again, and a bound for what stayed unknown.",
    "window_passes": "How many windows of the prompt detectors had the model read once more.",
    "timings_ms": "total; own: the guard's own work before the first byte; verdict: from sending upstream to the "
    "decision; window_passes: of it, until the windows were read; upstream_first_byte; upstream: until its answer "
    "ended.",
}
"""Each field of a ledger entry and what it means."""


def _worst_of_each(decisions: Sequence[Decision]) -> tuple[RuleHit, ...]:
    """In the order of the rules' first hits."""
    found: dict[str, RuleHit] = {}
    for hit in (hit for one in decisions for hit in one.hits):
        if hit.rule not in found or found[hit.rule].severity < hit.severity:
            found[hit.rule] = hit
    return tuple(found.values())


def _scores(scores: Mapping[str, Score], measured: Mapping[str, str]) -> dict[str, Any]:
    return {
        "scores": {name: score.value for name, score in scores.items()},
        "detectors": {name: _status(score) for name, score in scores.items()},
        "timed_out": [name for name, score in scores.items() if score.timed_out],
        "details": {name: dict(score.details) for name, score in scores.items() if score.details},
        "passages": {
            name: [[one.start, one.end, round(one.weight, 4)] for one in score.passages]
            for name, score in scores.items()
            if score.passages
        },
        "measured": {name: measured[name] for name in scores if name in measured},
    }


def _beside(shadow: Beside) -> dict[str, Any]:
    return {
        "policy": shadow.policy,
        "policy_hash": shadow.policy_hash,
        "action": shadow.decision.action,
        "rule": shadow.decision.rule,
        "reason": shadow.decision.reason,
        "hits": [_hit(hit) for hit in shadow.decision.hits],
        **_scores(shadow.scores, shadow.measured),
    }


def _answered(answer: Answered, measured: Mapping[str, str], beside: Mapping[str, str]) -> dict[str, Any]:
    shadow = answer.shadow
    return {
        "choice": answer.choice,
        "would": shadow.decision.action if shadow else None,
        **_judged(answer, measured),
        "complete": answer.complete,
        "times": answer.times,
        "shadow": _judged(shadow, beside) if shadow else None,
    }


def _judged(answer: Answered, measured: Mapping[str, str]) -> dict[str, Any]:
    whole = {name: one for name, one in answer.whole.items() if len(one.seen) > 1}
    end = {name: one for name, one in answer.end.items() if one.seen != answer.whole[name].seen}
    return {
        "action": answer.decision.action,
        "rule": answer.decision.rule,
        "reason": answer.decision.reason,
        "way": way_of((), answer.decision),
        **_scores(answer.scores, measured),
        "over_time": {name: _spread(one) for name, one in whole.items()},
        "at_end": {name: _spread(one) for name, one in end.items()},
    }


def _spread(spread: Spread) -> dict[str, Any]:
    return {
        "lowest": spread.lowest.value if spread.lowest else None,
        "highest": spread.highest.value if spread.highest else None,
        "without": [_status(one) for one in spread.without],
        "timed_out": any(one.timed_out for one in spread.without),
    }


def _hit(hit: RuleHit) -> dict[str, Any]:
    return {
        "rule": hit.rule,
        "action": hit.action,
        "mode": hit.mode,
        "on_error": hit.on_error,
        "reason": hit.reason,
    }


def _status(score: Score) -> str:
    return score.status if score.status == "scored" and not score.floor else f"{score.status}: {score.reason}"


def _ms(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s * 1000, 3)
