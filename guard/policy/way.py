"""How a decision is carried out, in short: what of a policy decides what a model is asked after it.

Owns which fields of a rule these are. Two decisions of one action and one way lead to the same request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from guard.policy.engine import CompiledRule, Decision
from guard.policy.schema import Rule

CHANGING = ("redact", "steer", "retry", "route")
"""Actions after which a model is asked otherwise than the client did."""

LENGTH = 12


def way_of(rules: Sequence[CompiledRule], decision: Decision) -> str:
    """Hash of what the rule that decided does to the request, and of the gated steerings of ``rules`` that go with
    every one; empty where nothing is done to it."""
    armed = [one.rule for one in rules if one.armed]
    acting = [] if decision.by is None or decision.by.action not in CHANGING else [decision.by]
    done = [_does(rule) for rule in (*acting, *(one for one in armed if one not in acting))]
    return hashlib.sha256(json.dumps(done, sort_keys=True).encode()).hexdigest()[:LENGTH] if done else ""


def _does(rule: Rule) -> dict[str, object]:
    return rule.model_dump(mode="json", include={"action", "steer", "gate", "redact", "route"})
