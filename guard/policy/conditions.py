"""Conditions of rules: what may be asked of detectors' scores, as structure and not as an expression language.

Owns the condition types of a policy file. How they are evaluated is ``guard.policy.engine``'s.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

DetectorName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,24}$")]
ScoreStatusName = Literal["scored", "unavailable", "timeout", "not_applicable"]


def _no_truth(value: Any) -> Any:
    """``True`` equals 1 in Python, and YAML's words for it without quotes, ``no`` and ``off`` too, are no text."""
    if isinstance(value, bool):
        raise ValueError(f"must not be {str(value).lower()}; a word such as yes or off is text in quotes alone")
    return value


NoTruth = BeforeValidator(_no_truth)
"""Of what is inside a field's mapping; fields themselves are never true where a number is asked for."""

Version = Literal[1]
"""Of a file's format."""


class Section(BaseModel):
    """Base of all types of policy files: frozen, without unknown keys, every field's docstring its manual."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        return value if cls.model_fields[info.field_name or ""].annotation is bool else _no_truth(value)


class ScoreCondition(Section):
    """True when a detector's score lies in the range; false when the detector does not apply to the request; unknown
    when there should be a score and is none, or one that may be higher and does not reach `at_least`: of a prompt's end
    where the last message is the assistant's or the system's, or a text has marks in it that chat templates end turns
    with; or of a detector with windows, where not all of them were read."""

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
        if isinstance(self.at_least, float) and isinstance(self.below, float) and self.at_least >= self.below:
            raise ValueError(f"no score of {self.detector} is at least {self.at_least:g} and below {self.below:g}")
        return self


class StatusCondition(Section):
    """True when a detector's status is the one asked about; never unknown."""

    detector: DetectorName
    """Name under `detectors`."""

    status: ScoreStatusName
    """`scored`: there is a score. `unavailable`: there should be one and is none, for whatever reason. `timeout`: that,
    because it did not come in time. `not_applicable`: the request has no message in the detector's `scope`."""


class AllCondition(Section):
    """True when every condition is; false when any is false; else unknown."""

    all: Annotated[tuple[Condition, ...], Field(min_length=1)]
    """Conditions."""


class AnyCondition(Section):
    """True when any condition is; false when every one is; else unknown."""

    any: Annotated[tuple[Condition, ...], Field(min_length=1)]
    """Conditions."""


class NotCondition(Section):
    """True when the condition is false, false when it is true, else unknown."""

    not_: Annotated[Condition, Field(alias="not")]
    """The condition."""


def _condition_form(value: Any) -> str | None:
    """The form's tag, in brackets: no field's name has any, so errors can leave it out of their place."""
    if isinstance(value, dict):
        return next((f"<{form}>" for form in ("all", "any", "not", "status") if form in value), "<score>")
    forms_of_types = ((AllCondition, "all"), (AnyCondition, "any"), (NotCondition, "not"), (StatusCondition, "status"))
    for type_, form in (*forms_of_types, (ScoreCondition, "score")):
        if isinstance(value, type_):
            return f"<{form}>"
    return None


Condition = Annotated[
    Annotated[ScoreCondition, Tag("<score>")]
    | Annotated[StatusCondition, Tag("<status>")]
    | Annotated[AllCondition, Tag("<all>")]
    | Annotated[AnyCondition, Tag("<any>")]
    | Annotated[NotCondition, Tag("<not>")],
    Discriminator(
        _condition_form,
        custom_error_type="condition",
        custom_error_message="a condition is a mapping with detector, all, any or not",
    ),
]


def children(condition: Condition) -> tuple[Condition, ...]:
    """The conditions that one is made of."""
    if isinstance(condition, AllCondition):
        return condition.all
    if isinstance(condition, AnyCondition):
        return condition.any
    return (condition.not_,) if isinstance(condition, NotCondition) else ()


def bounds_of(condition: Condition) -> list[ScoreCondition]:
    """All conditions on scores in one."""
    if isinstance(condition, ScoreCondition):
        return [condition]
    return [bound for child in children(condition) for bound in bounds_of(child)]


def detectors_of(condition: Condition) -> tuple[str, ...]:
    """Names of all detectors that a condition asks about."""
    if isinstance(condition, ScoreCondition | StatusCondition):
        return (condition.detector,)
    return tuple(name for child in children(condition) for name in detectors_of(child))


for _model in (AllCondition, AnyCondition, NotCondition):
    _model.model_rebuild()
