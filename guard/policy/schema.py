"""What a policy file may say. These types are the manual: loader, reference page and error messages come from them.

Owns the YAML's shape and the checks that need nothing but the file. Whether a threshold's name or a steering vector
exists is checked when the policy is bound to detectors (``guard.policy.bound``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from guard.mia.spec import Steer, check_selectors, one_selector_is_a_list_of_one

RuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,48}$")]
DetectorName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,24}$")]
SpanName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,32}$")]
Mode = Literal["enforce", "shadow"]
ActionName = Literal["block", "flag", "steer"]
OnError = Literal["block", "allow", "flag"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class DetectorUse(_Section):
    """One detector that rules may refer to. It is measured once a request, however many rules use it."""

    kind: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$", examples=["probe", "attention_tracker"])]
    """Which detector: a built-in kind or one that an installed package registers."""

    config: Annotated[str | None, Field(examples=["SmolLM2-135M-Instruct", "my-probe.json"])] = None
    """Its calibration. A name means `model_configs/KIND/NAME.json`; a path ending in `.json` is relative to this file.
    Default: the file named after the served model."""

    spans: Annotated[dict[SpanName, tuple[str, ...]], Field(examples=[{"data": ["user.last", "tool"]}])] = {}
    """Which messages the detector's spans mean: span name to selectors (`ROLE`, `ROLE.first`, `ROLE.last`,
    `message.N`). Default: the detector's own choice."""

    _one_selector = field_validator("spans", mode="before")(one_selector_is_a_list_of_one)

    @field_validator("spans")
    @classmethod
    def _selectors_parse(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, selectors in value.items():
            if not selectors:
                raise ValueError(f"span {name!r} names no messages")
            check_selectors(name, selectors)
        return value


class ScoreCondition(_Section):
    """True when a detector's score lies in the range; unknown when there is no score."""

    detector: DetectorName
    """Name under `detectors`."""

    at_least: Annotated[float | str | None, Field(examples=["fpr_1pct", 0.9])] = None
    """Lower bound, inclusive: a number, or the name of a threshold that calibration measured."""

    below: Annotated[float | str | None, Field(examples=["fpr_1pct", 0.99])] = None
    """Upper bound, exclusive: a number, or a threshold's name."""

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.at_least is None and self.below is None:
            raise ValueError("needs at_least, below, or both")
        return self


class StatusCondition(_Section):
    """True when a detector has (`scored`) or has not (`unavailable`) given a score; never unknown."""

    detector: DetectorName
    """Name under `detectors`."""

    status: Literal["scored", "unavailable"]
    """What is asked about."""


class AllCondition(_Section):
    """True when every condition is; false when any is false; else unknown."""

    all: Annotated[tuple[Condition, ...], Field(min_length=1)]
    """Conditions."""


class AnyCondition(_Section):
    """True when any condition is; false when every one is; else unknown."""

    any: Annotated[tuple[Condition, ...], Field(min_length=1)]
    """Conditions."""


class NotCondition(_Section):
    """True when the condition is false, false when it is true, else unknown."""

    not_: Annotated[Condition, Field(alias="not")]
    """The condition."""


def _condition_form(value: Any) -> str | None:
    if isinstance(value, dict):
        forms = [form for form in ("all", "any", "not", "status") if form in value]
        return forms[0] if forms else "score"
    forms_of_types = ((AllCondition, "all"), (AnyCondition, "any"), (NotCondition, "not"), (StatusCondition, "status"))
    for type_, form in (*forms_of_types, (ScoreCondition, "score")):
        if isinstance(value, type_):
            return form
    return None


Condition = Annotated[
    Annotated[ScoreCondition, Tag("score")]
    | Annotated[StatusCondition, Tag("status")]
    | Annotated[AllCondition, Tag("all")]
    | Annotated[AnyCondition, Tag("any")]
    | Annotated[NotCondition, Tag("not")],
    Discriminator(
        _condition_form,
        custom_error_type="condition",
        custom_error_message="a condition is a mapping with detector, all, any or not",
    ),
]


class Rule(_Section):
    """When a condition holds, an action is taken. Of several rules that hit, `block` outranks `steer` outranks `flag`;
    among equals the first in the file decides, and every flag is reported."""

    name: RuleName
    """Shown in headers, ledger and metrics; unique in the policy."""

    stage: Literal["prompt"] = "prompt"
    """When it is judged. `prompt`: once the model has read the prompt, before the first byte of the answer."""

    when: Condition
    """The condition."""

    action: ActionName
    """`block`: HTTP 400 with `error.code` `content_filter`, and the model stops. `flag`: the answer passes, with
    `x-guard-*` headers. `steer`: the answer is generated with the vectors under `steer`."""

    steer: tuple[Steer, ...] = ()
    """For `action: steer` only: steering vectors by name, with layer, coefficient and phase."""

    mode: Mode = "enforce"
    """`shadow`: the rule is judged and recorded, and nothing is done."""

    on_error: OnError = "flag"
    """What is done when the condition is unknown because a score is missing. `allow` lets the request pass unmarked."""

    message: Annotated[str, Field(max_length=400)] = "This request was blocked by a guardrail."
    """For `block`: what the client is told. The rule's name is added, prompt text never is."""

    @model_validator(mode="after")
    def _steer_belongs_to_the_action(self) -> Self:
        if (self.action == "steer") != bool(self.steer):
            raise ValueError("action steer needs a list under steer, and only that action has one")
        return self

    @model_validator(mode="after")
    def _steering_has_no_gate(self) -> Self:
        if any(steer.gate is not None for steer in self.steer):
            raise ValueError("a gate names a request's own readouts, which the rules of a policy do not have")
        return self


class Policy(_Section):
    """One policy file."""

    version: Literal[1]
    """Version of this format."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,48}$")]
    """Shown in headers, ledger and metrics, with a hash of the content."""

    description: Annotated[str, Field(max_length=2000)] = ""
    """For people."""

    mode: Mode = "enforce"
    """`shadow`: no rule of the policy does anything; what it would have done is recorded."""

    prompt_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Longest wait, in seconds, for the scores of the prompt; afterwards they count as missing and `on_error` says what
    happens. The time that the model takes to read the prompt is part of it."""

    detectors: Annotated[dict[DetectorName, DetectorUse], Field(max_length=16)] = {}
    """Detectors by the name that rules use."""

    rules: Annotated[tuple[Rule, ...], Field(max_length=64)] = ()
    """Rules, in the order in which they are reported. Without a hit the request is allowed."""

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        names = [rule.name for rule in self.rules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rules share a name: {', '.join(twice)}")
        for rule in self.rules:
            if unknown := sorted(set(detectors_of(rule.when)) - self.detectors.keys()):
                raise ValueError(
                    f"rule {rule.name!r} uses detectors that are not defined: {', '.join(unknown)}; "
                    f"defined are: {', '.join(sorted(self.detectors)) or 'none'}"
                )
        return self


def children(condition: Condition) -> tuple[Condition, ...]:
    if isinstance(condition, AllCondition):
        return condition.all
    if isinstance(condition, AnyCondition):
        return condition.any
    return (condition.not_,) if isinstance(condition, NotCondition) else ()


def detectors_of(condition: Condition) -> tuple[str, ...]:
    """Names of all detectors that a condition asks about."""
    if isinstance(condition, ScoreCondition | StatusCondition):
        return (condition.detector,)
    return tuple(name for child in children(condition) for name in detectors_of(child))


for _model in (AllCondition, AnyCondition, NotCondition, Rule, Policy):
    _model.model_rebuild()
