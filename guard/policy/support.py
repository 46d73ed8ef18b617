"""What of a policy this proxy can carry out. The rest is refused when the policy is loaded: never silently left out.

Owns the list. It grows with the proxy; the schema describes the whole.
"""

from __future__ import annotations

from guard.policy.loading import LoadedPolicy
from guard.policy.schema import ActionName, Stage

STAGES: frozenset[Stage] = frozenset({"prompt"})
ACTIONS: frozenset[ActionName] = frozenset({"block", "flag", "steer"})


def refuse_unsupported(loaded: LoadedPolicy) -> None:
    """Raises ``PolicyError`` at the first rule that this proxy cannot carry out, whatever its mode."""
    for i, rule in enumerate(loaded.policy.rules):
        for field, value, known in (("stage", rule.stage, STAGES), ("action", rule.action, ACTIONS)):
            if value not in known:
                what = f"this version of the proxy cannot carry out {field} {value}; it can: {', '.join(sorted(known))}"
                raise loaded.error(("rules", i, field), what)
