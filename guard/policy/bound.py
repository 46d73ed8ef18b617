"""A policy bound to a model's detectors: what to ask the engine for, scores from what came back, and the decision.

Owns names on the way there and back: a capture of detector ``d`` travels as ``d.capture``. Never sees a tensor or HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from detectors.base import Detector, Score
from detectors.model_config import ModelConfigError
from detectors.registry import UnknownDetectorError, build_detector
from guard.mia.results import AttentionReadout, Readout, Readouts
from guard.mia.spec import AttentionCapture, HiddenCapture, MiaSpec, Span, Steer
from guard.policy.engine import CompiledRule, Decision, compile_condition, decide
from guard.policy.schema import Mode
from guard.policy.store import LoadedPolicy

log = logging.getLogger("guard.policy")


@dataclass(frozen=True)
class BoundPolicy:
    """Ready to judge requests. ``label`` names the policy and its content's hash, for headers, ledger and metrics."""

    name: str
    hash: str
    label: str
    spec: MiaSpec
    prompt_timeout_s: float
    rule_names: tuple[str, ...]
    detectors: Mapping[str, Detector]
    rules: tuple[CompiledRule, ...]

    @property
    def detector_kinds(self) -> dict[str, str]:
        return {name: detector.kind for name, detector in self.detectors.items()}

    @property
    def reads(self) -> bool:
        """Whether anything is asked of the engine."""
        return bool(self.spec.hidden or self.spec.attention)

    @property
    def enforces(self) -> bool:
        """Whether any rule acts; if none does, nobody needs to wait for scores."""
        return any(compiled.mode == "enforce" for compiled in self.rules)

    @property
    def steers(self) -> tuple[Steer, ...]:
        """Every steering that any rule may ask for."""
        return tuple(steer for compiled in self.rules for steer in compiled.rule.steer)

    def scores(self, readouts: Readouts | None, reason: str = "") -> dict[str, Score]:
        """One score a detector. None for ``readouts`` makes each unavailable, with ``reason``."""
        if readouts is None:
            return {name: Score("unavailable", reason=reason) for name in self.detectors}
        return {name: _score(detector, name, readouts) for name, detector in self.detectors.items()}

    def decide(self, scores: Mapping[str, Score]) -> Decision:
        return decide(self.rules, scores)

    def steered(self, decision: Decision) -> MiaSpec:
        """What to ask of the engine for the steered answer: the steering alone."""
        return MiaSpec(steer=decision.steer)


def build_detectors(loaded: LoadedPolicy, config_key: str, model_configs: Path) -> dict[str, Detector]:
    """Build the policy's detectors from the calibrations of one model. Raises ``PolicyError``."""
    built = {}
    for name, use in loaded.policy.detectors.items():
        config = use.config or config_key
        path = loaded.path.parent / config if config.endswith(".json") else model_configs / use.kind / f"{config}.json"
        try:
            built[name] = build_detector(use.kind, path)
        except UnknownDetectorError as error:
            raise loaded.error(("detectors", name, "kind"), str(error)) from None
        except ModelConfigError as error:
            raise loaded.error(("detectors", name, "config"), str(error)) from None
    return built


def bind(
    loaded: LoadedPolicy, detectors: Mapping[str, Detector], vectors: Collection[str] | None = None
) -> BoundPolicy:
    """Compile the rules. ``vectors``: names of the steering vectors there are, None when unknown here.

    Raises ``PolicyError`` for a threshold, span or vector that does not exist.
    """
    policy = loaded.policy
    rules = []
    for i, rule in enumerate(policy.rules):

        def bound(detector: str, value: float | str, at: int = i) -> float:
            if isinstance(value, float):
                return value
            known = detectors[detector].thresholds
            if value not in known:
                have = ", ".join(sorted(known)) or "none: its file was not calibrated here"
                raise loaded.error(("rules", at, "when"), f"{detector} has no threshold {value!r}; it has {have}")
            return known[value]

        for steer in rule.steer:
            if vectors is not None and steer.vector not in vectors:
                have = ", ".join(sorted(vectors)) or "none"
                raise loaded.error(("rules", i, "steer"), f"no steering vector {steer.vector!r}; there are: {have}")
        mode: Mode = "shadow" if "shadow" in (policy.mode, rule.mode) else "enforce"
        rules.append(CompiledRule(rule, mode, compile_condition(rule.when, bound)))
    return BoundPolicy(
        name=policy.name,
        hash=loaded.hash,
        label=f"{policy.name}@{loaded.hash[:12]}",
        spec=_spec(loaded, detectors),
        prompt_timeout_s=policy.prompt_timeout_s,
        rule_names=tuple(rule.name for rule in policy.rules),
        detectors=detectors,
        rules=tuple(rules),
    )


def _spec(loaded: LoadedPolicy, detectors: Mapping[str, Detector]) -> MiaSpec:
    """Everything that the detectors need, and nothing else."""
    spans: dict[str, Span] = {}
    hidden: dict[str, HiddenCapture] = {}
    attention: dict[str, AttentionCapture] = {}
    for name, detector in detectors.items():
        plan, given = detector.plan(), loaded.policy.detectors[name].spans
        if unknown := sorted(given.keys() - plan.spans.keys()):
            have = ", ".join(sorted(plan.spans)) or "none"
            raise loaded.error(
                ("detectors", name, "spans"), f"{detector.kind} has no span {unknown[0]!r}; it has {have}"
            )
        spans |= {f"{name}.{span}": given.get(span, selectors) for span, selectors in plan.spans.items()}
        hidden |= {f"{name}.{capture}": wanted for capture, wanted in plan.hidden.items()}
        for capture, reading in plan.attention.items():
            names = tuple(f"{name}.{span}" for span in reading.spans)
            attention[f"{name}.{capture}"] = reading.model_copy(update={"spans": names})
    return MiaSpec(spans=spans, hidden=hidden, attention=attention)


def _score(detector: Detector, name: str, readouts: Readouts) -> Score:
    prefix = f"{name}."
    own = {
        key.removeprefix(prefix): _as_detector_named_it(item, prefix)
        for key, item in readouts.items.items()
        if key.startswith(prefix)
    }
    try:
        score = detector.score(own)
    except Exception as error:  # a detector may be anybody's, and no score is never clean
        log.warning("detector %s failed: %s", name, type(error).__name__)
        return Score("unavailable", reason=f"the detector failed ({type(error).__name__})")
    if score.status == "scored" and (score.value is None or not isfinite(score.value)):
        return Score("unavailable", reason="the score is not a number")
    return score


def _as_detector_named_it(item: Readout, prefix: str) -> Readout:
    if isinstance(item, AttentionReadout):
        return replace(item, mass={span.removeprefix(prefix): mass for span, mass in item.mass.items()})
    return item
