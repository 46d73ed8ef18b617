"""What the console's pages show, as JSON: a line for a request, the whole of one, and what is known of a detector.

Owns these shapes. Numbers and reasons alone; texts of prompts and answers come from ``contents``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from detectors.base import AnyDetector, Score
from detectors.model_config import ModelConfig
from guard.policy import BoundPolicy, Decision
from guard.policy.dissect import dissect
from guard.policy.schema import SEVERITY, Stage, detectors_in
from guard.telemetry.recent import Finished
from guard.telemetry.record import Answered, RequestRecord

STAGES: tuple[Stage, ...] = ("prompt", "stream", "output")

Json = dict[str, Any]


def line(record: RequestRecord) -> Json:
    """One request in the list."""
    decision = record.deciding
    scores = {**record.scores, **(record.answer.scores if record.answer else {})}
    return {
        "time": record.started_at.isoformat(timespec="milliseconds"),
        "request_id": record.request_id,
        "route": record.route,
        "passed": record.passed,
        "model": record.model_told,
        "policy": record.policy,
        "assignment": record.assignment,
        "key": record.key,
        "streamed": record.streamed,
        "action": record.action,
        "would": decision.would if decision else "none",
        "rules": record.rules,
        "outcome": record.outcome,
        "error_code": record.error_code,
        "status": record.status,
        "scores": {name: score.value for name, score in scores.items()},
        "total_ms": None if record.total_s is None else round(record.total_s * 1000, 2),
        "tokens": [record.prompt_tokens, record.generated_tokens],
    }


def whole(finished: Finished) -> Json:
    """One request's page."""
    record, judges = finished.record, finished.judges
    shown: Json = {"entry": record.to_entry(), "rules": [], "detectors": [], "shadow": None}
    shown["course"] = [{"tokens": one.tokens, "scores": dict(one.scores)} for one in record.course]
    if judges is None:
        return shown
    shown["rules"] = _rules(judges.live, record.scores, record.decision, record.answers, record.deciding)
    shown["detectors"] = _detectors(judges.live, record)
    if judges.shadow is not None and record.shadow is not None:
        beside = record.shadow
        would = [one.shadow for one in record.answers if one.shadow is not None]
        worst = max(record.shadow_decisions, key=lambda one: SEVERITY[one.action])
        rules = _rules(judges.shadow, beside.scores, beside.decision, would, worst)
        shown["shadow"] = {"policy": beside.policy, "action": worst.action, "rules": rules}
    return shown


def _rules(
    policy: BoundPolicy,
    of_prompt: Mapping[str, Score],
    on_prompt: Decision | None,
    answers: Sequence[Answered],
    deciding: Decision | None,
) -> list[Json]:
    """Every rule, of stages that were not come to as well. What hit is what was recorded: in a stream a rule stays hit
    whatever its scores are at the end, as it does when its answer was generated again. Its ``reason``, ``condition``
    and ``scores`` are all of those that it hit on first, as severely as it did; ``answer_scores`` are the highest that
    its detectors gave the last answer."""
    shown = []
    highest = answers[-1].scores if answers else {}
    last = {name: one.counts for name, one in answers[-1].end.items()} if answers else {}
    met = {rule: scores for one in answers for rule, scores in one.met.items()}
    prompt = [] if on_prompt is None else [on_prompt]
    for stage in STAGES:
        decisions = prompt if stage == "prompt" else [one.decision for one in answers]
        scores = of_prompt if stage == "prompt" else last
        at_hits = met if stage != "prompt" else {}
        hits = {hit.rule: hit for one in decisions for hit in one.hits}
        for one in dissect(policy, scores, stage, at_hits):
            hit = hits.get(one.name)
            shown.append(
                {
                    **asdict(one),
                    "judged": bool(decisions),
                    "hit": hit is not None and not hit.on_error,
                    "on_error": hit is not None and hit.on_error,
                    "does": hit.action if hit is not None else one.does,
                    "reason": hit.reason if hit is not None else one.reason,
                    "decided": deciding is not None and deciding.rule == one.name,
                    "scores": {name: score.value for name, score in at_hits.get(one.name, scores).items()},
                    "answer_scores": {
                        name: highest[name].value
                        for name in detectors_in(policy.rule(one.name))
                        if stage != "prompt" and name in highest
                    },
                }
            )
    return shown


def _detectors(policy: BoundPolicy, record: RequestRecord) -> list[Json]:
    """Each detector with its score: of the answer where it was scored there, the highest of all times, else of the
    prompt."""
    of_answer = record.answer.scores if record.answer is not None else {}
    shown = []
    for name, detector in policy.detectors.items():
        score = of_answer.get(name, record.scores.get(name))
        shown.append(
            {
                "name": name,
                "kind": detector.kind,
                "of": "answer" if name in of_answer else "prompt",
                "status": score.status if score else "not_measured",
                "value": score.value if score else None,
                "reason": score.reason if score else "",
                "thresholds": dict(detector.thresholds),
                "details": dict(score.details) if score else {},
                "passages": [[one.start, one.end, one.weight] for one in score.passages] if score else [],
            }
        )
    return shown


def calibration(policies: Sequence[BoundPolicy]) -> list[Json]:
    """Of every policy's detectors, each calibration once, with the policies and names under which it is used."""
    found: dict[int, Json] = {}
    for policy in policies:
        for name, detector in policy.detectors.items():
            config = getattr(detector, "config", None)
            same = id(config) if isinstance(config, ModelConfig) else id(detector)
            key = next((k for k, one in found.items() if one["config"] == _config(detector)), same)
            shown = found.setdefault(key, {"kind": detector.kind, "config": _config(detector), "used": []})
            shown["used"].append({"policy": policy.name, "detector": name})
            shown.setdefault("thresholds", dict(detector.thresholds))
    return list(found.values())


def _config(detector: AnyDetector) -> Json | None:
    """What its file says of the model and of how it was measured; None of a detector that has no such file."""
    config = getattr(detector, "config", None)
    if not isinstance(config, ModelConfig):
        return None
    return config.model_dump(mode="json", include={"model_info", "verified", "published", "calibration"})
