"""A policy bound to a model's detectors: what to ask the engine for, scores from what came back, and the decision.

Owns what must hold between a policy and a model: thresholds, spans, vectors and gates that exist, and a spec that an
engine accepts. Never sees a tensor or HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from detectors.base import AnyDetector, Score, ScoreDetector, TextDetector
from detectors.engine_probes import computed_by
from detectors.isolated import IsolatedText, wants_isolation
from detectors.model_config import ModelConfigError, fingerprint_of
from detectors.registry import UnknownDetectorError, build_detector, detector_kinds
from guard.mia.results import Readouts
from guard.mia.spec import MiaSpec, Steer
from guard.mistakes import first_mistake
from guard.policy.absent import AbsentDetector
from guard.policy.capture import Capture
from guard.policy.compiled import compile_rules
from guard.policy.engine import CompiledRule, Decision, blocks_when_late, decide, longest_wait_s
from guard.policy.gates import steering_of
from guard.policy.loading import LoadedPolicy, digests
from guard.policy.measuring import Measurement, Question, Steering, measurement, question, with_combined
from guard.policy.schema import DetectorUse, Rule, Stage, Streaming, detectors_in
from guard.policy.waits import Waits, waits_of

log = logging.getLogger("guard.policy")

PROGRESS_IN_WINDOW = 4
"""How often in a window of tokens the engine says what an answer has in it."""


@dataclass(frozen=True)
class BoundPolicy:
    """Ready to judge requests. ``label`` names the policy and its content's hash, for headers, ledger and metrics.

    ``spec``: everything that its detectors may read, words of spans in place. ``hold_s``: how long an answer is held
    for scores at most, 0 when no enforced rule needs any; ``prompt_timeout_s``: how long scores are worth recording.
    ``steerings``: by rule. ``digests``: detector -> what a score of it depends on, short. ``waits``: how long rules
    wait for each detector. ``capture``: what may be kept of the texts.
    """

    name: str
    hash: str
    label: str
    spec: MiaSpec
    hold_s: float
    prompt_timeout_s: float
    rule_names: tuple[str, ...]
    detectors: Mapping[str, AnyDetector]
    rules: tuple[CompiledRule, ...]
    uses: Mapping[str, DetectorUse]
    measurements: Mapping[str, Measurement]
    steerings: Mapping[str, Steering]
    digests: Mapping[str, str]
    streaming: Streaming
    window_tokens: int
    waits: Waits
    capture: Capture | None = None

    @cached_property
    def detector_kinds(self) -> dict[str, str]:
        return {name: detector.kind for name, detector in self.detectors.items()}

    @property
    def steers(self) -> tuple[Steer, ...]:
        """Every steering that any rule may ask for."""
        return tuple(steer for compiled in self.rules for steer in compiled.rule.steer)

    @cached_property
    def armed(self) -> tuple[Steering, ...]:
        """Gated steerings that go with every request."""
        return tuple(self.steerings[compiled.rule.name] for compiled in self.rules if compiled.armed)

    @cached_property
    def rules_of_answers(self) -> tuple[CompiledRule, ...]:
        """Rules that judge answers."""
        return tuple(one for one in self.rules if one.rule.stage != "prompt")

    @cached_property
    def progress_tokens(self) -> int | None:
        """How often the engine must say what an answer's tokens have in them while it grows; None when no rule waits
        for that. Several times a window, so that a token is not released before it was judged."""
        stage: Stage = "stream"
        reads = any(self.measurements[name].reads_answer for name in self.detectors_of((stage,)))
        return max(1, self.window_tokens // PROGRESS_IN_WINDOW) if reads else None

    @cached_property
    def holds_answers(self) -> bool:
        """Whether a rule that judges answers may do more than report."""
        return any(one.mode == "enforce" and _may_act(one.rule) for one in self.rules_of_answers)

    def detectors_of(self, stages: Collection[Stage]) -> frozenset[str]:
        """Detectors that are scored at any of these stages."""
        return frozenset().union(*(self._by_stage[stage] for stage in stages))

    @cached_property
    def _by_stage(self) -> dict[Stage, frozenset[str]]:
        """Of the prompt all that can be scored there, but for those of text that only later rules use."""

        def used(stage: Stage) -> frozenset[str]:
            named = {name for one in self.rules if one.rule.stage == stage for name in detectors_in(one.rule)}
            return frozenset(named | {of for name in named for of in self.measurements[name].inputs.values()})

        prompt, stream, output = used("prompt"), used("stream"), used("output")

        def of_answers(name: str) -> bool:
            one = self.measurements[name]
            by_rules = (one.reads_text or one.combines) and name in stream | output
            return one.reads_answer or one.asks_again or by_rules or any(map(of_answers, one.inputs.values()))

        only_later = set(filter(of_answers, self.measurements))
        return {"prompt": frozenset(self.measurements.keys() - only_later) | prompt, "stream": stream, "output": output}

    def wait_s(self, name: str, stages: Collection[Stage]) -> float:
        """How long the enforced rules of these stages wait for a detector's score, in seconds; 0 where none uses it."""
        rules = [one for one in self.rules if name in self._used_by(one.rule)]
        return max(longest_wait_s(rules, self.prompt_timeout_s, stage) for stage in stages)

    def ends_when_late(self, name: str, stages: Collection[Stage]) -> bool:
        """Whether a rule blocks, whatever else is found, when a detector's score is late."""
        return any(
            one.rule.stage in stages
            and one.mode == "enforce"
            and name in self._used_by(one.rule)
            and blocks_when_late(one)
            for one in self.rules
        )

    def _used_by(self, rule: Rule) -> set[str]:
        """Detectors that a rule names, and those whose scores these combine."""
        named = detectors_in(rule)
        return {*named, *(of for name in named for of in self.measurements[name].inputs.values())}

    def computed_by(self, probes: Collection[str]) -> BoundPolicy:
        """The same, whose detectors have an engine multiply that was started with ``probes``, by name, where it can."""
        detectors = {name: computed_by(one, probes) for name, one in self.detectors.items()}
        measurements = {
            name: one
            if detectors[name] is one.detector
            else measurement(one.key, detectors[name], self.uses[name], one.inputs)
            for name, one in self.measurements.items()
        }
        spec = question(measurements.values(), None).spec
        return replace(self, detectors=detectors, measurements=measurements, spec=spec)

    def rule(self, name: str) -> Rule:
        return next(one.rule for one in self.rules if one.rule.name == name)

    def scores(self, readouts: Readouts | None, reason: str = "") -> dict[str, Score]:
        """One score a detector, of a request to which all apply. None for ``readouts`` makes each unavailable, with
        ``reason``."""
        return with_combined(
            self.measurements, Question(self.spec, {}).scores(self.measurements, readouts, reason, False), {}
        )

    def decide(self, scores: Mapping[str, Score], stage: Stage = "prompt") -> Decision:
        return decide(self.rules, scores, stage)

    def steered(self, decision: Decision, roles: Sequence[str] = ()) -> MiaSpec:
        """What to ask of the engine for the steered answer: the steerings, and the readouts that their gates need."""
        return self.steering_spec(self.steerings_for(decision), roles)

    def steering_spec(self, steerings: Sequence[Steering], roles: Sequence[str] | None) -> MiaSpec:
        """Raises ``ValidationError`` for more vectors than an engine takes."""
        read = {one.reads for one in steerings}
        return question([one for one in self.measurements.values() if one.key in read], roles, steerings).spec

    def steerings_for(self, decision: Decision | None) -> list[Steering]:
        """Those that a decision asks for, and those that go with every request."""
        rule = decision.rule if decision is not None and decision.steer else None
        deciding = [self.steerings[rule]] if rule is not None else []
        return [*deciding, *(one for one in self.armed if one not in deciding)]


def thresholds_alone(loaded: LoadedPolicy, model_configs: Path) -> dict[str, Mapping[str, float]]:
    """Of those detectors that can be built without saying which model: their file is named, or they read none."""
    # The others are without thresholds by name; a rule that uses one is told so.
    found = {name: _alone(loaded, name, model_configs) for name in loaded.policy.detectors}
    return {name: one.thresholds for name, one in found.items() if not isinstance(one, AbsentDetector)}


def build_alone(loaded: LoadedPolicy, model_configs: Path) -> dict[str, AnyDetector]:
    """Build what can be without saying which model; an ``AbsentDetector`` stands for any other. Raises ``PolicyError``
    for a file that the policy names by its path, or that is there by its name, and cannot be used."""

    def built(name: str) -> AnyDetector:
        config, path = loaded.policy.detectors[name].config, config_path(loaded, name, "", model_configs)
        if config is not None and (_is_path(config) or path.exists()):
            return _built(loaded, name, path)
        return _alone(loaded, name, model_configs)

    return {name: built(name) for name in loaded.policy.detectors}


def _alone(loaded: LoadedPolicy, name: str, model_configs: Path) -> AnyDetector:
    kind, path = loaded.policy.detectors[name].kind, config_path(loaded, name, "", model_configs)
    try:
        return build_detector(kind, path)
    except (UnknownDetectorError, ModelConfigError, OSError, ValueError):
        # Somebody else's detector may say in its own way that there is no file.
        return AbsentDetector(kind, path)


def _is_path(config: str) -> bool:
    return config.endswith((".json", ".npz"))


def config_path(loaded: LoadedPolicy, name: str, config_key: str, model_configs: Path) -> Path:
    """Where the file of a detector is, for the model that ``config_key`` names, if the policy names none."""
    use = loaded.policy.detectors[name]
    config = use.config or config_key
    own = loaded.file_of(("detectors", name, "config")).parent / config
    return own if _is_path(config) else model_configs / use.kind / f"{config}.json"


def build_detectors(loaded: LoadedPolicy, config_key: str, model_configs: Path) -> dict[str, AnyDetector]:
    """Build the policy's detectors from the calibrations of one model. Raises ``PolicyError``."""
    names = loaded.policy.detectors
    return {name: _built(loaded, name, config_path(loaded, name, config_key, model_configs)) for name in names}


def _built(loaded: LoadedPolicy, name: str, path: Path) -> AnyDetector:
    use = loaded.policy.detectors[name]
    if use.optional and use.kind in detector_kinds() and not path.exists():
        absent = AbsentDetector(use.kind, path)
        log.warning("policy %s: detector %s: %s", loaded.label, name, absent.reason)
        return absent
    try:
        detector = build_detector(use.kind, path)
    except UnknownDetectorError as error:
        raise loaded.error(("detectors", name, "kind"), str(error)) from None
    except ModelConfigError as error:
        raise loaded.error(("detectors", name, "config"), str(error)) from None
    if not wants_isolation(detector):
        return detector
    if not isinstance(detector, TextDetector):
        raise loaded.error(("detectors", name, "kind"), f"{use.kind} is isolated, which only detectors of text can be")
    return IsolatedText(detector, path)


def bind(
    loaded: LoadedPolicy, detectors: Mapping[str, AnyDetector], vectors: Collection[str] | None = None
) -> BoundPolicy:
    """Compile the rules. ``vectors``: names of the steering vectors there are, None when unknown here.

    Raises ``PolicyError`` for a threshold, span or vector that does not exist, for what the proxy cannot carry out, and
    for more than an engine takes in one request.
    """
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
        digests=digests(loaded, {name: fingerprint_of(detector) for name, detector in detectors.items()}),
        streaming=policy.streaming,
        window_tokens=policy.window_tokens,
        waits=waits_of(rules, policy.prompt_timeout_s),
        capture=policy.capture,
    )
    _check_inputs(loaded, bound)
    _check_stages(loaded, bound)
    _check_steerings(loaded, bound)
    return bound


def _measurement(loaded: LoadedPolicy, name: str, detector: AnyDetector) -> Measurement:
    try:
        use = loaded.policy.detectors[name]
        if isinstance(detector, AbsentDetector):
            # Whatever spans and inputs it would have, there is nothing to bind them to.
            use = DetectorUse(kind=use.kind, scope=use.scope)
        return measurement(name, detector, use, use.inputs)
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


def _check_stages(loaded: LoadedPolicy, bound: BoundPolicy) -> None:
    """No rule is judged before what its detectors read can be there."""
    for i, rule in enumerate(loaded.policy.rules):
        asked = detectors_in(rule) if rule.stage != "output" and rule.gate is None else ()
        for name in (one for named in asked for one in (named, *bound.measurements[named].inputs.values())):
            one = bound.measurements[name]
            if one.asks_again:
                raise loaded.error(
                    ("rules", i, "stage"),
                    f"{name} has the model read the answer once more, when it is complete: stage output",
                )
            if one.reads_answer and rule.stage == "prompt":
                raise loaded.error(
                    ("rules", i, "stage"), f"{name} reads generated tokens, of which a prompt has none: stage stream"
                )


def _check_inputs(loaded: LoadedPolicy, bound: BoundPolicy) -> None:
    """A combination has the score of each of its inputs' kinds, and nothing else takes scores."""
    for name, detector in bound.detectors.items():
        if isinstance(detector, AbsentDetector):
            continue
        given = bound.measurements[name].inputs
        wanted = detector.inputs if isinstance(detector, ScoreDetector) else ()
        at = ("detectors", name, "inputs")
        if given.keys() != set(wanted):
            have = ", ".join(sorted(wanted)) or "none"
            raise loaded.error(at, f"the inputs of a {detector.kind} are: {have}; not: {', '.join(given) or 'none'}")
        for kind, of in given.items():
            if (found := bound.detectors[of].kind) != kind:
                raise loaded.error(at, f"{kind} is to be the score of a {kind}, and {of} is a {found}")


def _may_act(rule: Rule) -> bool:
    return rule.action != "flag" or "block" in (rule.on_error, rule.on_timeout)


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
    return first_mistake(error)[1]
