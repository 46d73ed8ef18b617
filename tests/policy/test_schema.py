"""What a rule may say depends on its action; what makes no sense is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from guard.policy.schema import DetectorUse, Rule

WHEN = {"detector": "a", "at_least": 0.5}
VECTOR = {"vector": "calm", "layer": 3, "coefficient": 2.0}
DECODE = {**VECTOR, "phase": "decode"}
OWN_GATE = {"readout": "r", "above": 1}


def rule(**fields: Any) -> Rule:
    return Rule.model_validate({"name": "r", "when": WHEN, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "block", "respond": "refusal", "message": "No."},
        {"action": "block", "stage": "stream", "severity": 99},
        {"action": "flag", "stage": "output", "severity": 9},
        {"action": "redact", "redact": {"messages": "tool_results", "replacement": "-"}},
        {"action": "redact", "stage": "output", "redact": {}},
        {"action": "steer", "steer": [VECTOR], "severity": 89},
        {"action": "steer", "steer": [DECODE], "gate": {"probe": "p", "above": 1}, "when": None},
        {"action": "steer", "steer": [DECODE], "gate": {"detector": "a", "span": "data", "below": 0.2}},
        {"action": "retry", "stage": "output", "steer": [VECTOR], "attempts": 3},
        {"action": "route", "route": {"model": "safe"}},
    ],
)
def test_every_action_can_be_said(fields: dict[str, Any]) -> None:
    assert rule(**fields).action == fields["action"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"action": "steer"}, "needs a list under steer"),
        ({"action": "block", "steer": [VECTOR]}, "steer is for action steer and retry, not for block"),
        ({"action": "flag", "respond": "refusal"}, "respond is for action block"),
        ({"action": "flag", "attempts": 1}, "attempts is for action retry"),
        ({"action": "redact"}, "needs redact"),
        ({"action": "redact", "redact": {}}, "with messages at stage prompt"),
        ({"action": "redact", "redact": {"messages": ["User says"]}}, "is not a selector"),
        ({"action": "redact", "stage": "output", "redact": {"messages": ["user"]}}, "without them later"),
        ({"action": "route"}, "needs route"),
        ({"action": "retry", "steer": [VECTOR]}, "action retry is for stage output, not for prompt"),
        ({"action": "steer", "stage": "stream", "steer": [VECTOR]}, "action steer is for stage prompt"),
        ({"action": "flag", "severity": 10}, "the severity of action flag is from 1 to 9, not 10"),
        ({"action": "block", "severity": 89}, "the severity of action block is from 90 to 99"),
        ({"action": "steer", "steer": [VECTOR], "severity": 90}, "from 10 to 89"),
        ({"action": "flag", "when": None}, "when is needed"),
        ({"action": "steer", "steer": [VECTOR], "gate": {"probe": "p", "above": 1}}, "has phase decode"),
        ({"action": "steer", "steer": [{**DECODE, "gate": OWN_GATE}]}, "a field of the rule"),
        ({"action": "steer", "steer": [DECODE], "gate": {"above": 1}}, "either probe or detector"),
        ({"action": "steer", "steer": [DECODE], "gate": {"probe": "p"}}, "either above or below"),
        ({"action": "steer", "steer": [DECODE], "gate": {"detector": "a", "above": 1}}, "names one of its spans"),
        ({"action": "steer", "steer": [DECODE], "gate": {"probe": "p", "span": "data", "above": 1}}, "only such"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        rule(**fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"scope": ["user.last.part.0"]}, "not parts of them"),
        ({"scope": "User says"}, "is not a selector"),
        ({"spans": {"data": []}}, "names no messages"),
    ],
)
def test_a_detectors_messages_are_checked(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        DetectorUse.model_validate({"kind": "probe", **fields})


def test_a_single_selector_needs_no_list() -> None:
    use = DetectorUse.model_validate({"kind": "probe", "scope": "new_tool_results", "spans": {"data": "last_turn"}})
    assert (use.scope, use.spans) == (("new_tool_results",), {"data": ("last_turn",)})
