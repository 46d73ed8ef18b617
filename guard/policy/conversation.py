"""Which messages of a conversation a policy means: message selectors, and the words that only a conversation settles.

Owns the words and their meaning. Sees the messages' roles alone, never their text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence, Set

from guard.mia.spec import SELECTOR, check_selectors

LAST_TURN, TOOL_RESULTS, NEW_TOOL_RESULTS = "last_turn", "tool_results", "new_tool_results"
WORDS = (LAST_TURN, TOOL_RESULTS, NEW_TOOL_RESULTS)
"""``last_turn``: every message after the last answer of the assistant that was replied to. ``tool_results``: all
results of tools. ``new_tool_results``: those of them that are in the last turn."""

TOOL_ROLES = ("tool", "function")
SYSTEM_ROLE, DEVELOPER_ROLE = "system", "developer"
OPERATORS_ROLES = (SYSTEM_ROLE, DEVELOPER_ROLE)
"""What the operator writes into every request is part of no turn. A developer's message is OpenAI's newer name for a
system's, and meant wherever that is: neither word makes it nobody's."""

ANSWERING_ROLE = "assistant"
CLIENTS_ROLES = ("user", *TOOL_ROLES)
KNOWN_ROLES = frozenset((*OPERATORS_ROLES, *CLIENTS_ROLES, ANSWERING_ROLE))
"""Roles of OpenAI's API. A client may write any other, and many templates show it: a message of a role that neither
this list nor the policy has, a stranger, is meant wherever a user's message or a tool's result is, so that no new name
makes a message nobody's."""

DOCUMENTS, OF_USERS = -2, -3
"""In place of a message's index, for what a template may show outside of all messages. Documents that a request has
beside its messages are data as a tool's results are, and meant wherever any of these are; what else a client has there
is meant wherever any message of a user is."""

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


def roles_named(selectors: Iterable[str]) -> frozenset[str]:
    """The roles that selectors name themselves."""
    matched = (SELECTOR.fullmatch(one) for one in selectors if one not in WORDS)
    return frozenset(match["role"] for match in matched if match is not None and match["role"] is not None)


def ends_behind_others(roles: Sequence[str]) -> bool:
    """Whether the last message is the assistant's or the operator's, and not of those who bring something in."""
    return bool(roles) and roles[-1] in (ANSWERING_ROLE, *OPERATORS_ROLES)


def any_stranger(roles: Iterable[str], named: Collection[str] = ()) -> bool:
    """Whether there is a role that neither the API nor the policy has. named: as in ``resolved``."""
    return any(role not in KNOWN_ROLES and role not in named for role in roles)


def means_what_it_says(roles: Collection[str]) -> bool:
    """Whether every selector of roles means the messages of these very roles, and no others."""
    return DEVELOPER_ROLE not in roles and not any_stranger(roles)


def resolved(selectors: Sequence[str], roles: Sequence[str], named: Collection[str] | None = None) -> tuple[str, ...]:
    """The selectors with each word replaced by what it means among messages of these ``roles``, in order.

    named: roles that the policy has besides the known ones; by default those that the selectors name.
    A turn of more messages than one span can name becomes all messages of the roles in it: more is read, never less.
    Raises ``ConversationError``.
    """
    plain = _plain(selectors, roles, named)
    if len(plain) > MAX_SELECTORS:
        plain = list(dict.fromkeys(_role_of(one, roles) for one in plain))
        if len(plain) > MAX_SELECTORS:
            raise ConversationError(f"its messages cannot be named with {MAX_SELECTORS} selectors")
    if not plain:
        raise ConversationError(f"no message is meant by {', '.join(selectors)}")
    return tuple(dict.fromkeys(plain))


def matches(selectors: Sequence[str], roles: Sequence[str], named: Collection[str] | None = None) -> bool:
    """Whether any message is meant by any of the selectors. named: as in ``resolved``."""
    return any(_finds(one, roles) for one in _plain(selectors, roles, named))


def places(
    selectors: Sequence[str], roles: Sequence[str], named: Collection[str] | None = None
) -> set[tuple[int, int | None]]:
    """Every message that is meant: its index, and of it one part, counted from its first or last, or None for all. The
    index is ``DOCUMENTS`` or ``OF_USERS`` for what is in no message. named: as in ``resolved``."""
    found = {place for one in _plain(selectors, roles, named) for place in _places(one, roles)}
    if means_documents(selectors):
        found.add((DOCUMENTS, None))
    if LAST_TURN in selectors or "user" in roles_named(selectors):
        found.add((OF_USERS, None))
    return found


def means_documents(selectors: Iterable[str]) -> bool:
    """Whether documents beside the messages are meant: wherever any results of tools are."""
    return any(one in WORDS or not roles_named([one]).isdisjoint(TOOL_ROLES) for one in selectors)


def _plain(selectors: Sequence[str], roles: Sequence[str], named: Collection[str] | None) -> list[str]:
    known = KNOWN_ROLES | (roles_named(selectors) if named is None else frozenset(named))
    strangers = frozenset(i for i, role in enumerate(roles) if role not in known)
    return [one for selector in selectors for one in _meaning(selector, roles, strangers)]


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


def _meaning(selector: str, roles: Sequence[str], strangers: Set[int]) -> list[str]:
    if selector == TOOL_RESULTS:
        return [one for role in TOOL_ROLES for one in _with_others(role, roles, strangers)]
    if selector not in WORDS:
        return _with_others(selector, roles, strangers)
    turn = range(_turn_begins(roles), len(roles))
    if selector == LAST_TURN:
        meant = [i for i in turn if roles[i] not in OPERATORS_ROLES]
    else:
        meant = [i for i in turn if roles[i] in TOOL_ROLES or i in strangers]
    return [f"message.{i}" for i in meant]


def _with_others(selector: str, roles: Sequence[str], strangers: Set[int]) -> list[str]:
    """The selector, or the messages that it means where messages of other roles are among them."""
    match = SELECTOR.fullmatch(selector)
    others: Set[int] = frozenset()
    if match is not None and match["role"] in CLIENTS_ROLES:
        others = strangers
    elif match is not None and match["role"] == SYSTEM_ROLE:
        others = frozenset(i for i, role in enumerate(roles) if role == DEVELOPER_ROLE)
    if not others or match is None:
        return [selector]
    meant = [i for i, role in enumerate(roles) if role == match["role"] or i in others]
    meant = {"first": meant[:1], "last": meant[-1:]}.get(match["which"], meant)
    part = "" if match["part"] is None else f".part.{match['part']}"
    return [f"message.{i}{part}" for i in meant]


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
