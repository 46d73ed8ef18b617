"""``guard policy diff``: what one policy says that another does not, by detector, rule and field, not by line.

Owns the comparison of two checked policies: spelling, order of fields and inheritance make no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from guard.policy.schema import Policy


def differences(before: Policy, after: Policy) -> list[str]:
    """One line each: ``+`` only in ``after``, ``-`` only in ``before``, ``~`` changed. Empty when they say the same."""
    old, new = _named(before), _named(after)
    lines = list(_compare("", old, new))
    kept = [name for name in old["rules"] if name in new["rules"]]
    reordered = [name for name in new["rules"] if name in old["rules"]]
    if kept != reordered:
        lines.append(f"~ rules: order {', '.join(kept)} -> {', '.join(reordered)}")
    return lines


def _named(policy: Policy) -> dict[str, Any]:
    """As plain data, rules by name. Whole, so that a default that is written out is no difference."""
    data = policy.model_dump(mode="json", by_alias=True)
    rules = zip(policy.rules, data["rules"], strict=True)
    # What a severity is, not how it came about.
    return {**data, "rules": {rule.name: {**fields, "severity": rule.rank} for rule, fields in rules}}


def _compare(path: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            below = f"{path}.{key}" if path else str(key)
            if key not in after:
                yield f"- {below}: {_short(before[key])}"
            elif key not in before:
                yield f"+ {below}: {_short(after[key])}"
            else:
                yield from _compare(below, before[key], after[key])
    elif before != after:
        yield f"~ {path}: {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    return json.dumps(_said(value))


def _said(value: Any) -> Any:
    """Without the fields that say nothing."""
    if isinstance(value, Mapping):
        return {key: _said(one) for key, one in value.items() if one not in (None, [], {}, "") and one is not False}
    return [_said(one) for one in value] if isinstance(value, list) else value
