"""What of a selection this proxy cannot follow. It is refused when it is loaded: never silently left out.

Owns the list. What a policy's rules cannot do with the detectors that they name is ``guard.policy.bound``'s.
"""

from __future__ import annotations

from guard.policy.selection import Selection


def unsupported_selection(selection: Selection) -> tuple[tuple[str | int, ...], str] | None:
    """The first field of a selection that this proxy cannot follow, and why; None when there is none."""
    for i, assignment in enumerate(selection.assignments):
        if assignment.match.tenants:
            return ("assignments", i, "match", "tenants"), "this version of the proxy knows keys and no tenants"
    return None
