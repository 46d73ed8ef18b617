"""Words of scopes and spans mean messages of a conversation, and a client cannot make them mean nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.mia.spec import MiaSpec
from guard.policy.conversation import ConversationError, ends_behind_others, matches, resolved

unhurried = settings(deadline=None, max_examples=60)
"""Other processes may take the machine from a test."""

AGENT = ("system", "user", "assistant", "tool", "tool", "assistant", "tool")


@pytest.mark.parametrize(
    ("selectors", "roles", "meaning"),
    [
        (("user.last", "tool"), AGENT, ("user.last", "tool")),
        (("last_turn",), ("system", "user"), ("message.1",)),
        (("last_turn",), ("user", "assistant", "user"), ("message.2",)),
        (("last_turn",), AGENT, ("message.6",)),
        (("last_turn",), ("user", "assistant", "tool", "user"), ("message.2", "message.3")),
        (("new_tool_results", "user.last"), AGENT, ("message.6", "user.last")),
        (("tool_results",), AGENT, ("tool", "function")),
        (("last_turn",), ("user", "assistant"), ("message.0", "message.1")),
        (("last_turn",), ("user", "assistant", "user", "assistant", "system"), ("message.2", "message.3")),
        (("last_turn", "message.1"), ("system", "user"), ("message.1",)),
        # A role that nobody knows may be a user's or a tool's.
        (("user",), ("system", "user", "human"), ("message.1", "message.2")),
        (("user.last", "system"), ("system", "user", "User"), ("message.2", "system")),
        (("user.first.part.-1",), ("ipython", "user"), ("message.0.part.-1",)),
        (("tool_results",), ("user", "tool", "ipython"), ("message.1", "message.2")),
        (("new_tool_results",), ("user", "assistant", "ipython"), ("message.2",)),
        (("assistant",), ("user", "human"), ("assistant",)),
        (("user", "document"), ("document", "user"), ("user", "document")),
        # OpenAI's newer name of the system's message.
        (("system",), ("developer", "user"), ("message.0",)),
        (("system.last",), ("system", "user", "developer"), ("message.2",)),
        (("system", "user.last"), ("system", "developer", "user"), ("message.0", "message.1", "user.last")),
        (("system.first.part.0",), ("developer", "system"), ("message.0.part.0",)),
        (("developer",), ("system", "developer"), ("developer",)),
    ],
)
def test_a_word_means_the_messages_of_its_kind(
    selectors: tuple[str, ...], roles: tuple[str, ...], meaning: tuple[str, ...]
) -> None:
    assert resolved(selectors, roles) == meaning


def test_a_turn_of_many_messages_is_read_as_its_roles_which_is_more_and_not_less() -> None:
    assert resolved(("last_turn",), ("user", "assistant", *["tool"] * 20, "user")) == ("tool", "user")


def test_what_cannot_be_named_is_an_error_and_not_an_empty_span() -> None:
    with pytest.raises(ConversationError, match="no message is meant by new_tool_results"):
        resolved(("new_tool_results",), ("system", "user"))
    with pytest.raises(ConversationError, match="cannot be named"):
        resolved(("last_turn",), ["Odd Role"] * 17)


@pytest.mark.parametrize(
    ("scope", "roles", "applies"),
    [
        (("tool_results",), AGENT, True),
        (("tool_results",), ("user",), False),
        (("new_tool_results",), ("user", "assistant", "tool", "assistant", "user"), False),
        (("new_tool_results",), AGENT, True),
        (("user", "tool"), ("system", "tool"), True),
        (("message.1",), ("user",), False),
        (("last_turn",), ("system",), False),
        (("user",), ("system", "human"), True),
        (("new_tool_results",), ("user", "assistant", "Tool"), True),
        (("system",), ("human",), False),
        (("system",), ("developer", "user"), True),
        (("developer",), ("system", "user"), False),
    ],
)
def test_a_scope_holds_when_any_message_is_meant(scope: tuple[str, ...], roles: tuple[str, ...], applies: bool) -> None:
    assert matches(scope, roles) == applies


roles = st.lists(st.sampled_from(["system", "user", "assistant", "tool", "developer", "critic", "Über"]), max_size=40)


@unhurried
@given(roles)
def test_every_conversation_with_a_users_message_has_a_last_turn_that_an_engine_takes(given_roles: list[str]) -> None:
    assert matches(("last_turn",), given_roles) == any(role not in ("system", "developer") for role in given_roles)
    for word in ("last_turn", "new_tool_results", "tool_results"):
        try:
            MiaSpec(spans={"s": resolved((word,), given_roles)})
        except ConversationError:
            assert word != "tool_results"


@unhurried
@given(roles, st.integers(1, 3))
def test_answers_that_a_client_puts_at_the_end_do_not_empty_the_turn(given_roles: list[str], answers: int) -> None:
    turn = [one for one in range(len(given_roles)) if _in_turn(one, given_roles)]
    padded = [*given_roles, *["assistant"] * answers]
    if any(given_roles[one] not in ("assistant", "system", "developer") for one in turn):
        assert all(_in_turn(one, padded) for one in turn if given_roles[one] != "assistant")


def _in_turn(index: int, conversation: list[str]) -> bool:
    try:
        selectors = resolved(("last_turn",), conversation)
    except ConversationError:
        return False
    return f"message.{index}" in selectors or conversation[index] in selectors


def test_a_role_that_reads_like_a_selector_is_not_taken_for_one() -> None:
    assert resolved(("last_turn",), ["user"] * 17 + ["user.first"]) == ("user", "message.17")


@pytest.mark.parametrize(
    ("roles", "behind"),
    [
        (("system", "user"), False),
        (("user", "assistant"), True),
        (("user", "assistant", "system", "developer"), True),
        (("user", "assistant", "tool"), False),
        (("user", "assistant", "assistant"), True),
        (("assistant", "human"), False),
        (("user", "system"), True),
        (("system",), True),
        ((), False),
    ],
)
def test_a_conversation_ends_behind_others_where_assistant_or_operator_speak_last(
    roles: tuple[str, ...], behind: bool
) -> None:
    assert ends_behind_others(roles) == behind
