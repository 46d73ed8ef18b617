"""A policy bound to a model's detectors: what to ask the engine for, scores from what came back, and the decision.

Owns what must hold between a policy and a model: thresholds, spans, vectors and gates that exist, and a spec that an
engine accepts. Never sees a tensor or HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from detectors.base import Detector, Score
from detectors.model_config import ModelConfigError
from detectors.registry import UnknownDetectorError, build_detector
from guard.mia.results import Readouts
from guard.mia.spec import MiaSpec, Steer
from guard.policy.compiled import compile_rules
from guard.policy.engine import CompiledRule, Decision, decide, longest_wait_s
from guard.policy.gates import steering_of
from guard.policy.loading import LoadedPolicy, digests
from guard.policy.measuring import Measurement, Question, Steering, measurement, question
from guard.policy.schema import DetectorUse
from guard.policy.support import refuse_unsupported


@dataclass(frozen=True)
class BoundPolicy:
    """Ready to judge requests. ``label`` names the policy and its content's hash, for headers, ledger and metrics.

    ``spec``: everything that its detectors may read, words of spans in place. ``hold_s``: how long an answer is held
    for scores at most, 0 when no enforced rule needs any; ``prompt_timeout_s``: how long scores are worth recording.
    ``steerings``: by rule. ``digests``: detector -> what a score of it depends on, short.
    """

    name: str
    hash: str
    label: str
    spec: MiaSpec
    hold_s: float
    prompt_timeout_s: float
    rule_names: tuple[str, ...]
    detectors: Mapping[str, Detector]
    rules: tuple[CompiledRule, ...]
    uses: Mapping[str, DetectorUse]
    measurements: Mapping[str, Measurement]
    steerings: Mapping[str, Steering]
    digests: Mapping[str, str]

    @property
    def detector_kinds(self) -> dict[str, str]:
        return {name: detector.kind for name, detector in self.detectors.items()}

    @property
    def steers(self) -> tuple[Steer, ...]:
        """Every steering that any rule may ask for."""
        return tuple(steer for compiled in self.rules for steer in compiled.rule.steer)

    @property
    def armed(self) -> tuple[Steering, ...]:
        """Gated steerings that go with every request."""
        return tuple(self.steerings[compiled.rule.name] for compiled in self.rules if compiled.armed)

    def scores(self, readouts: Readouts | None, reason: str = "") -> dict[str, Score]:
        """One score a detector, of a request to which all apply. None for ``readouts`` makes each unavailable, with
        ``reason``."""
        return Question(self.spec, {}).scores(self.measurements, readouts, reason, False)

    def decide(self, scores: Mapping[str, Score]) -> Decision:
        return decide(self.rules, scores)

    def steered(self, decision: Decision, roles: Sequence[str] = ()) -> MiaSpec:
        """What to ask of the engine for the steered answer: the steerings, and the readouts that their gates need."""
        deciding = [self.steerings[decision.rule]] if decision.rule is not None and decision.steer else []
        return self.steering_spec([*deciding, *(one for one in self.armed if one not in deciding)], roles)

    def steering_spec(self, steerings: Sequence[Steering], roles: Sequence[str] | None) -> MiaSpec:
        """Raises ``ValidationError`` for more vectors than an engine takes."""
        read = {one.reads for one in steerings}
        return question([one for one in self.measurements.values() if one.key in read], roles, steerings).spec


def build_detectors(loaded: LoadedPolicy, config_key: str, model_configs: Path) -> dict[str, Detector]:
    """Build the policy's detectors from the calibrations of one model. Raises ``PolicyError``."""
    built = {}
    for name, use in loaded.policy.detectors.items():
        config = use.config or config_key
        own = loaded.file_of(("detectors", name, "config")).parent / config
        path = own if config.endswith(".json") else model_configs / use.kind / f"{config}.json"
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

    Raises ``PolicyError`` for a threshold, span or vector that does not exist, for what the proxy cannot carry out, and
    for more than an engine takes in one request.
    """
    refuse_unsupported(loaded)
    policy = loaded.policy
    rules = compile_rules(loaded, {name: detector.thresholds for name, detector in detectors.items()})
    measurements = {name: _measurement(loaded, name, detector) for name, detector in detectors.items()}
    steerings = {}
    for i, rule in enumerate(policy.rules):
        _check_vectors(loaded, i, vectors)
        if rule.steer:
            try:
                steerings[rule.name] = steering_of(rule, measurements)
            except ValueError as error:
                raise loaded.error(("rules", i, "gate"), str(error)) from None
    bound = BoundPolicy(
        name=policy.name,
        hash=loaded.hash,
        label=loaded.label,
        spec=_whole_spec(loaded, measurements),
        hold_s=longest_wait_s(rules, policy.prompt_timeout_s),
        prompt_timeout_s=policy.prompt_timeout_s,
        rule_names=tuple(rule.name for rule in policy.rules),
        detectors=detectors,
        rules=rules,
        uses=policy.detectors,
        measurements=measurements,
        steerings=steerings,
        digests=digests(loaded),
    )
    _check_steerings(loaded, bound)
    return bound


def _measurement(loaded: LoadedPolicy, name: str, detector: Detector) -> Measurement:
    try:
        return measurement(name, detector, loaded.policy.detectors[name])
    except ValueError as error:
        raise loaded.error(("detectors", name, "spans"), str(error)) from None


def _check_vectors(loaded: LoadedPolicy, at: int, vectors: Collection[str] | None) -> None:
    for steer in loaded.policy.rules[at].steer:
        if vectors is not None and steer.vector not in vectors:
            have = ", ".join(sorted(vectors)) or "none"
            raise loaded.error(("rules", at, "steer"), f"no steering vector {steer.vector!r}; there are: {have}")


def _whole_spec(loaded: LoadedPolicy, measurements: Mapping[str, Measurement]) -> MiaSpec:
    """Everything that the detectors need, and nothing else."""
    try:
        return question(measurements.values(), None).spec
    except ValidationError as error:
        raise loaded.error(("detectors",), f"more than one request can ask for: {_first(error)}") from None


def _check_steerings(loaded: LoadedPolicy, bound: BoundPolicy) -> None:
    """Each rule's steering, together with those that go with every request, must be one spec."""
    for i, compiled in enumerate(bound.rules):
        if (own := bound.steerings.get(compiled.rule.name)) is None:
            continue
        try:
            bound.steering_spec([own, *(one for one in bound.armed if one is not own)], None)
        except ValidationError as error:
            raise loaded.error(("rules", i, "steer"), f"more than one request can ask for: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    return str(error.errors(include_url=False, include_input=False)[0]["msg"]).removeprefix("Value error, ")
