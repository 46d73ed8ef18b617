"""Where rules may route to: a model that vLLM serves, and none of another provider's.

Owns this one check. Another provider's model takes fewer fields and APIs than vLLM does, so a request that was good for
the one would fail at the other, and its client be told of a model that it never named.
"""

from __future__ import annotations

from collections.abc import Collection

from guard.policy.loading import LoadedPolicy


def check_routes(loaded: LoadedPolicy, elsewhere: Collection[str]) -> None:
    """Raises ``PolicyError`` for a rule that routes to a model of ``elsewhere``: those of other providers."""
    for i, rule in enumerate(loaded.policy.rules):
        if rule.route is not None and rule.route.model in elsewhere:
            raise loaded.error(
                ("rules", i, "route", "model"),
                f"rule {rule.name!r} routes to {rule.route.model}, which another provider serves (providers): it can "
                "only route to a model that vLLM serves",
            )
