"""How a decision is carried out, in short: what of a policy decides what a model is asked after it, or a client gets.

Owns which fields of a rule these are. Two decisions of one action and one way lead to the same request, and to the same
text in place of what is taken out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from guard.policy.engine import CompiledRule, Decision, RuleHit
from guard.policy.schema import Rule

CHANGING = ("redact", "steer", "retry", "route")
"""Actions after which a model is asked otherwise than the client did."""

LENGTH = 12


def way_of(rules: Sequence[CompiledRule], decision: Decision) -> str:
    """Hash of what the rule that decided does to request or answer, of what else is redacted, and of the gated
    steerings of ``rules`` that go with every request; empty where nothing is done."""
    armed = [] if decision.action == "block" else [one.rule for one in rules if one.armed]
    acting = [decision.by] if decision.by is not None and _acts(decision.by) else []
    done = [_does(rule) for rule in (*acting, *(one for one in armed if one not in acting))]
    done += sorted((_redacts(hit) for hit in redacting(decision)), key=str)
    return hashlib.sha256(json.dumps(done, sort_keys=True).encode()).hexdigest()[:LENGTH] if done else ""


def acting_in(rules: Sequence[CompiledRule], decision: Decision) -> list[str]:
    """Names of the rules that make a decision's way."""
    if decision.action == "block":
        return [decision.rule or ""]
    names = [decision.by.name] if decision.by is not None and _acts(decision.by) else []
    names += [hit.rule for hit in redacting(decision)]
    return names or [one.rule.name for one in rules if one.armed]


def redacting(decision: Decision) -> list[RuleHit]:
    """What hit beside the rule that decided and is redacted as well."""
    if decision.action == "block":
        return []
    return [hit for hit in decision.hits
            if hit.action == "redact" and hit.mode == "enforce" and hit.rule != decision.rule]  # fmt: skip


def _acts(rule: Rule) -> bool:
    return rule.action in CHANGING or (rule.action == "block" and rule.respond == "refusal")


def _does(rule: Rule) -> dict[str, object]:
    fields = (
        {"action", "respond", "message"} if rule.action == "block" else {"action", "steer", "gate", "redact", "route"}
    )
    return rule.model_dump(mode="json", include=fields)


def _redacts(hit: RuleHit) -> dict[str, object]:
    return {"action": hit.action, "redact": None if hit.redact is None else hit.redact.model_dump(mode="json")}
