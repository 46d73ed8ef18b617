"""Which messages of a conversation a policy means: message selectors, and the words that only a conversation settles.

Owns the words and their meaning. Sees the messages' roles alone, never their text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from guard.mia.spec import SELECTOR, check_selectors

LAST_TURN, TOOL_RESULTS, NEW_TOOL_RESULTS = "last_turn", "tool_results", "new_tool_results"
WORDS = (LAST_TURN, TOOL_RESULTS, NEW_TOOL_RESULTS)
"""``last_turn``: every message after the last answer of the assistant that was replied to. ``tool_results``: all
results of tools. ``new_tool_results``: those of them that are in the last turn."""

TOOL_ROLES = ("tool", "function")
OPERATORS_ROLES = ("system", "developer")
"""What the operator writes into every request is part of no turn."""

ANSWERING_ROLE = "assistant"
ROLE = re.compile(r"[a-z_]{1,32}")
MAX_SELECTORS = 16
"""What the aperture takes for one span."""


class ConversationError(ValueError):
    """The messages that a policy means cannot be named to the engine; the message says why."""


def check_message_selectors(name: str, selectors: tuple[str, ...]) -> None:
    """Raise ``ValueError`` for the first that is neither a word nor a selector."""
    if not selectors:
        raise ValueError(f"span {name!r} names no messages")
    check_selectors(name, tuple(one for one in selectors if one not in WORDS))


def resolved(selectors: Sequence[str], roles: Sequence[str]) -> tuple[str, ...]:
    """The selectors with each word replaced by what it means among messages of these ``roles``, in order.

    A turn of more messages than one span can name becomes all messages of the roles in it: more is read, never less.
    Raises ``ConversationError``.
    """
    plain = [one for selector in selectors for one in _meaning(selector, roles)]
    if len(plain) > MAX_SELECTORS:
        plain = list(dict.fromkeys(_role_of(one, roles) for one in plain))
        if len(plain) > MAX_SELECTORS:
            raise ConversationError(f"its messages cannot be named with {MAX_SELECTORS} selectors")
    if not plain:
        raise ConversationError(f"no message is meant by {', '.join(selectors)}")
    return tuple(dict.fromkeys(plain))


def matches(selectors: Sequence[str], roles: Sequence[str]) -> bool:
    """Whether any message is meant by any of the selectors."""
    return any(_finds(one, roles) for selector in selectors for one in _meaning(selector, roles))


def places(selectors: Sequence[str], roles: Sequence[str]) -> set[tuple[int, int | None]]:
    """Every message that is meant: its index, and of it one part, counted from its first or last, or None for all."""
    return {place for selector in selectors for one in _meaning(selector, roles) for place in _places(one, roles)}


def _places(selector: str, roles: Sequence[str]) -> list[tuple[int, int | None]]:
    match = SELECTOR.fullmatch(selector)
    assert match is not None, "checked when the policy was loaded"
    part = None if match["part"] is None else int(match["part"])
    if match["index"] is not None:
        index = _index(selector, roles)
        return [] if index is None else [(index % len(roles), part)]
    found = [i for i, role in enumerate(roles) if role == match["role"]]
    wanted = {"first": found[:1], "last": found[-1:]}.get(match["which"], found)
    return [(i, part) for i in wanted]


def _meaning(selector: str, roles: Sequence[str]) -> list[str]:
    if selector == TOOL_RESULTS:
        return list(TOOL_ROLES)
    if selector not in WORDS:
        return [selector]
    return [
        f"message.{i}"
        for i in range(_turn_begins(roles), len(roles))
        if (roles[i] in TOOL_ROLES if selector == NEW_TOOL_RESULTS else roles[i] not in OPERATORS_ROLES)
    ]


def _turn_begins(roles: Sequence[str]) -> int:
    """An answer at the very end was replied to by nobody: a client cannot make its turn empty by adding one."""
    end = max((i for i, role in enumerate(roles) if role not in (ANSWERING_ROLE, *OPERATORS_ROLES)), default=0)
    return max((i + 1 for i in range(end) if roles[i] == ANSWERING_ROLE), default=0)


def _index(selector: str, roles: Sequence[str]) -> int | None:
    """Position of the message that ``message.N`` names; None for other selectors, and where there is none."""
    match = SELECTOR.fullmatch(selector)
    if match is None or match["index"] is None:
        return None
    index = int(match["index"])
    return index if -len(roles) <= index < len(roles) else None


def _role_of(selector: str, roles: Sequence[str]) -> str:
    """All messages of the role of the one that ``message.N`` names, where a selector can say that role."""
    index = _index(selector, roles)
    return selector if index is None or not ROLE.fullmatch(roles[index]) else roles[index]


def _finds(selector: str, roles: Sequence[str]) -> bool:
    match = SELECTOR.fullmatch(selector)
    assert match is not None, "checked when the policy was loaded"
    return match["role"] in roles if match["index"] is None else _index(selector, roles) is not None
