"""What a policy file may say. These types are the manual: loader, JSON schema, reference page and error messages come
from them.

Owns the YAML's shape and the checks that need nothing but the file. Whether a threshold's name or a steering vector
exists is checked when the policy is bound to detectors (``guard.policy.bound``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from guard.mia.spec import Steer
from guard.policy.capture import Capture
from guard.policy.conditions import Condition, DetectorName, Section, Version, detectors_of
from guard.policy.conversation import check_message_selectors

RuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,48}$")]
PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,48}$")]
SpanName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,32}$")]
TEXT = {"type": "string"}
Selectors = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}),
]
"""A single one needs no list."""

Mode = Literal["enforce", "shadow"]
Streaming = Literal["hold", "window", "observe"]
Stage = Literal["prompt", "stream", "output"]
LATER: tuple[Stage, ...] = ("stream", "output")
"""Stages of rules for answers."""
ActionName = Literal["flag", "redact", "steer", "retry", "route", "block"]
OnError = Literal["block", "allow", "flag"]


@dataclass(frozen=True)
class Contract:
    """What a policy says of streams: what they wait for. Fields as in ``Policy``."""

    streaming: Streaming
    window_tokens: int


STAGES_OF_ACTIONS: dict[ActionName, tuple[Stage, ...]] = {
    "flag": ("prompt", "stream", "output"),
    "redact": ("prompt", "stream", "output"),
    "steer": ("prompt",),
    "retry": ("output",),
    "route": ("prompt", "output"),
    "block": ("prompt", "stream", "output"),
}
"""Where each action makes sense: what is generated already can be steered no more, only asked for again."""

Action = Literal["allow", "flag", "redact", "steer", "retry", "route", "block"]
SEVERITY: Mapping[Action, int] = {
    "allow": 0, "flag": 5, "redact": 20, "steer": 30, "retry": 40, "route": 50, "block": 95,
}  # fmt: skip
"""A rule's severity unless it declares another; the order of all actions."""

FLAG_BELOW, BLOCK_FROM = 10, 90
"""The bands of severities: a rule that only reports never outranks one that acts, and nothing outranks a block."""

STREAMING_OF_ACTIONS: Mapping[tuple[Stage, ActionName], tuple[Streaming, ...]] = {
    ("stream", "redact"): ("hold", "window"),
    ("output", "redact"): ("hold",),
    ("output", "retry"): ("hold",),
    ("output", "route"): ("hold",),
}
"""Where an action changes what a client would have got already; the others go with every contract."""

FIELDS_OF_ACTIONS: dict[str, tuple[ActionName, ...]] = {
    "steer": ("steer", "retry"),
    "gate": ("steer",),
    "redact": ("redact",),
    "route": ("route",),
    "attempts": ("retry",),
    "respond": ("block",),
}
"""Fields of a rule that belong to some actions only."""


class DetectorUse(Section):
    """One detector that rules may refer to. It is measured once a request, however many rules use it."""

    kind: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$", examples=["probe", "attention_tracker"])]
    """Which detector: a built-in kind or one that an installed package registers."""

    config: Annotated[str | None, Field(examples=["SmolLM2-135M-Instruct", "my-probe.json"])] = None
    """Its calibration. A name means `model_configs/KIND/NAME.json`; a path ending in `.json`, or in `.npz` for MIA's
    `h_node` probes, is relative to this file. Default: the file named after the served model."""

    optional: bool = False
    """Whether the policy can do without it: for a model without such a calibration the detector is `unavailable`, which
    is logged at start, and its rules follow their `on_error`. Default: the policy is refused."""

    spans: Annotated[dict[SpanName, Selectors], Field(examples=[{"data": ["user.last", "tool"]}])] = {}  # noqa: RUF012
    """Which messages the detector's spans mean: span name to selectors (`ROLE`, `ROLE.first`, `ROLE.last`, `message.N`,
    each also with `.part.N`) or words: `last_turn`, every message after the last answer that was replied to;
    `tool_results`; `new_tool_results`, those in the last turn. Earlier turns count as judged when they were new, which
    a client with a made-up history can use. Default: the detector's own choice."""

    inputs: Annotated[
        dict[SpanName, DetectorName], Field(examples=[{"probe": "injection", "text_baseline": "words"}])
    ] = {}  # noqa: RUF012
    """For a kind that combines scores: each of its inputs and the detector of this policy whose score that is."""

    scope: Annotated[Selectors, Field(examples=[["new_tool_results"], ["user"]])] = ()
    """Selectors and words as in `spans`. A request without any such message is not measured: the detector's status is
    `not_applicable` and its conditions are false; a request that has one which the engine cannot find is `unavailable`,
    and `on_error` decides. Roles are what the client writes: a developer's message counts as a system's; one of a role
    that neither OpenAI's API nor this detector names counts as a user's and as a tool's, and may be a system's: where
    there is no other, a detector that reads the model is `unavailable`. A raw prompt counts as such a message, and
    `documents` beside the messages as a tool's result. Requests with none of the messages that are meant are for
    another rule to judge. Default: every request is measured, and a detector of text reads
    everything that a template may show, tools' definitions too."""

    @field_validator("spans")
    @classmethod
    def _selectors_parse(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, selectors in value.items():
            check_message_selectors(name, selectors)
        return value

    @field_validator("scope")
    @classmethod
    def _scope_parses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            check_message_selectors("scope", value)
        if any(".part." in selector for selector in value):
            raise ValueError("a scope names messages, not parts of them")
        return value


class SteeringGate(Section):
    """Holds a steering back, inside the engine, until a readout crosses a number; then it acts to the answer's end.

    The readout is either a probe that the engine was started with or the attention that a detector's heads put on one
    of its spans.
    """

    probe: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")] = None
    """Name of a probe of the engine (`additional_config.mia.probes`); its first logit is compared."""

    positions: Literal["last_prompt", "prompt", "generated", "all"] = "generated"
    """For a probe: at which tokens it is read."""

    detector: DetectorName | None = None
    """Instead of a probe: a detector that reads attention. The mean mass over its heads is compared."""

    span: SpanName | None = None
    """For a detector: on which of its spans."""

    above: float | None = None
    """The steering begins when the readout is greater than this."""

    below: float | None = None
    """The steering begins when the readout is less than this."""

    @model_validator(mode="after")
    def _one_readout_and_one_number(self) -> Self:
        if (self.probe is None) == (self.detector is None):
            raise ValueError("a gate has either probe or detector")
        if (self.detector is None) != (self.span is None):
            raise ValueError("a gate on a detector names one of its spans, and only such a gate")
        if self.detector is not None and "positions" in self.model_fields_set:
            raise ValueError("a detector says itself where it reads; positions is for a probe")
        if (self.above is None) == (self.below is None):
            raise ValueError("a gate has either above or below")
        return self


class Redaction(Section):
    """What is taken out, and what stands there instead."""

    messages: Selectors = ()
    """At stage `prompt`: selectors and words as in a detector's `spans`; their whole texts are replaced, and the model
    is asked anew. Later stages redact the answer: the characters that the condition's detectors point at, all of it
    where none does. Logprobs of what is replaced are taken out."""

    replacement: Annotated[str, Field(max_length=400)] = "[removed by a guardrail]"
    """The text that the model, or the client, gets instead."""

    @field_validator("messages")
    @classmethod
    def _selectors_parse(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            check_message_selectors("messages", value)
        return value


class Routing(Section):
    """Which model answers instead."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """Name as a client would ask for it: one that the same vLLM serves; a model of another provider (`providers`) is
    refused."""


class Rule(Section):
    """When a condition holds, an action is taken. Of several rules that hit at one stage the one with the highest
    `severity` decides; among equals the first in the file. Every flag is reported."""

    name: RuleName
    """Shown in headers, ledger and metrics; unique in the policy."""

    stage: Stage = "prompt"
    """When it is judged. `prompt`: once the model has read the prompt, before the first byte of the answer. `stream`:
    while the answer is generated, and once more at its end. `output`: when it is complete; detectors that have the
    model read the answer once more are for this stage alone. With several choices each is judged, and the worst
    decides."""

    when: Condition | None = None
    """The condition. Only a steering with a `gate` can do without: it then goes with every request, and the gate alone
    says when it acts."""

    action: ActionName
    """`block`: the model stops, and the client gets what `respond` says; in mid-stream what was released ends with
    `finish_reason` `content_filter`. `flag`: the answer passes, with `x-guard-*` headers if they have not left.
    `redact`: text is replaced, of messages or of the answer. `steer`: the answer is generated with the vectors under
    `steer`. `retry`: the answer is generated again, with them. `route`: another model answers. A `retry` or `route`
    at stage `output` whose last answer still hits becomes a block."""

    severity: Annotated[int | None, Field(ge=1, le=99)] = None
    """Which of several rules decides: the highest. 1 to 9 for `flag`, 90 to 99 for `block`, 10 to 89 for the others, so
    that nothing outranks a block. Default: flag 5, redact 20, steer 30, retry 40, route 50, block 95."""

    mode: Mode = "enforce"
    """`shadow`: the rule is judged and recorded, and nothing is done."""

    on_error: OnError = "flag"
    """What is done when the condition is unknown because a score is missing. `allow` lets the request pass unmarked."""

    on_timeout: OnError | None = None
    """The same when every missing score is one that did not come in time. Default: as `on_error`."""

    timeout_s: Annotated[float | None, Field(gt=0, le=600)] = None
    """Longest wait for this rule's scores, in seconds. The answer is held while any enforced rule still waits. A
    detector of text has as long as the rules that use it, from when it begins to read; none is late for another's
    sake. Default: the policy's `prompt_timeout_s`."""

    message: Annotated[str, Field(max_length=400)] = "This request was blocked by a guardrail."
    """For `block`: what the client is told. An error adds the rule's name; prompt text is never added."""

    respond: Literal["error", "refusal"] = "error"
    """For `block`: `error` is HTTP 400 with `error.code` `content_filter`; `refusal` is an answer whose text is
    `message`, with `finish_reason` `content_filter`. A block by `on_error` is always HTTP 503. In mid-stream there is
    no status any more: a block ends the stream, one by `on_error` with an error."""

    steer: tuple[Steer, ...] = ()
    """For `steer` and `retry`: steering vectors by name, with layer, coefficient and phase."""

    gate: SteeringGate | None = None
    """For `steer`: holds all of the rule's vectors back until a readout crosses a number. They then have phase
    `decode`."""

    redact: Redaction | None = None
    """For `redact`."""

    route: Routing | None = None
    """For `route`."""

    attempts: Annotated[int, Field(ge=1, le=3)] = 1
    """For `retry`: how often at most."""

    @property
    def rank(self) -> int:
        """Its severity, declared or not."""
        return SEVERITY[self.action] if self.severity is None else self.severity

    @model_validator(mode="after")
    def _fields_belong_to_the_action(self) -> Self:
        if self.action in ("steer", "retry") and not self.steer:
            raise ValueError(f"action {self.action} needs a list under steer")
        if self.action == "redact" and (self.redact is None or (self.stage == "prompt") != bool(self.redact.messages)):
            raise ValueError("action redact needs redact, with messages at stage prompt and without them later")
        if self.action == "route" and self.route is None:
            raise ValueError("action route needs route")
        for field, actions in FIELDS_OF_ACTIONS.items():
            if field in self.model_fields_set and self.action not in actions:
                raise ValueError(f"{field} is for action {' and '.join(actions)}, not for {self.action}")
        if self.stage not in (stages := STAGES_OF_ACTIONS[self.action]):
            raise ValueError(f"action {self.action} is for stage {' and '.join(stages)}, not for {self.stage}")
        return self

    @model_validator(mode="after")
    def _severity_is_in_its_band(self) -> Self:
        low, high = {"flag": (1, FLAG_BELOW - 1), "block": (BLOCK_FROM, 99)}.get(
            self.action, (FLAG_BELOW, BLOCK_FROM - 1)
        )
        if not low <= self.rank <= high:
            raise ValueError(f"the severity of action {self.action} is from {low} to {high}, not {self.rank}")
        return self

    @model_validator(mode="after")
    def _gates_are_the_rules(self) -> Self:
        if any(steer.gate is not None for steer in self.steer):
            raise ValueError("the gate is a field of the rule, not of a vector: it holds all of them back")
        if self.gate is not None and any(steer.phase != "decode" for steer in self.steer):
            raise ValueError("a gated steering has phase decode")
        if self.when is None and self.gate is None:
            raise ValueError("when is needed; only a steering with a gate can do without")
        return self


class Policy(Section):
    """One policy file. With `extends` it begins as another one: what is written here replaces or adds to it, detectors
    and rules by their name."""

    version: Version
    """Version of this format."""

    name: PolicyName
    """Shown in headers, ledger and metrics, with a hash of the content."""

    description: Annotated[str, Field(max_length=2000)] = ""
    """For people."""

    mode: Mode = "enforce"
    """`shadow`: no rule of the policy does anything; what it would have done is recorded."""

    prompt_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Longest wait, in seconds, for the scores of the prompt; afterwards they count as missing and `on_timeout` says
    what happens. The time that the model takes to read the prompt is part of it."""

    capture: Capture | None = None
    """Which texts of requests may be kept. Default: none."""

    detectors: Annotated[dict[DetectorName, DetectorUse], Field(max_length=16)] = {}  # noqa: RUF012 - pydantic copies it
    """Detectors by the name that rules use."""

    streaming: Streaming = "hold"
    """What a streamed answer waits for; one that is not streamed is always judged as a whole. `hold`: for the verdict
    on the prompt and, when a rule of a later stage may change the answer, for its end. `window`: for the verdict on the
    prompt; from then on a token is released when `window_tokens` later ones have been judged with it. `observe`: for
    no score of the model; those that are there when the answer begins count, and a later block ends the stream there.
    Rules that only flag, and shadows, never hold an answer back."""

    window_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    """For `window`: how many tokens each choice's release stays behind. An answer's chunk counts as one token unless
    its logprobs show more."""

    rules: Annotated[tuple[Rule, ...], Field(max_length=64)] = ()
    """Rules, in the order in which they are reported. Without a hit the request is allowed."""

    @property
    def contract(self) -> Contract:
        return Contract(self.streaming, self.window_tokens)

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        names = [rule.name for rule in self.rules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rules share a name: {', '.join(twice)}")
        for rule in self.rules:
            if unknown := sorted(set(detectors_in(rule)) - self.detectors.keys()):
                raise ValueError(
                    f"rule {rule.name!r} uses detectors that are not defined: {', '.join(unknown)}; "
                    f"defined are: {', '.join(sorted(self.detectors)) or 'none'}"
                )
        return self

    @model_validator(mode="after")
    def _inputs_are_detectors(self) -> Self:
        for name, use in self.detectors.items():
            if unknown := sorted(set(use.inputs.values()) - self.detectors.keys()):
                raise ValueError(f"detector {name!r} takes the scores of {', '.join(unknown)}, which are not defined")
            if nested := sorted(of for of in use.inputs.values() if self.detectors[of].inputs):
                raise ValueError(f"detector {name!r} takes the score of {nested[0]!r}, which is itself a combination")
        return self

    @model_validator(mode="after")
    def _answers_are_held_for_what_changes_them(self) -> Self:
        for rule in self.rules:
            fit = STREAMING_OF_ACTIONS.get((rule.stage, rule.action), get_args(Streaming))
            if self.streaming not in fit:
                raise ValueError(
                    f"rule {rule.name!r}: action {rule.action} at stage {rule.stage} comes too late with streaming "
                    f"{self.streaming}; it needs {' or '.join(fit)}"
                )
        return self


def detectors_in(rule: Rule) -> tuple[str, ...]:
    """Names of all detectors that a rule refers to."""
    asked = () if rule.when is None else detectors_of(rule.when)
    return asked if rule.gate is None or rule.gate.detector is None else (*asked, rule.gate.detector)
