"""A request gets the policy that its key, tenant, model, route and headers say, and the same one every time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from guard.policy.judged_paths import RERANK
from guard.policy.selection import Choice, Match, RequestFacts, Selection, choose, fits

unhurried = settings(deadline=None, max_examples=60)
"""Other processes may take the machine from a test."""

KEY, OTHER_KEY = "a" * 64, "b" * 64
FACTS = RequestFacts("r-1", "/v1/chat/completions", "llama-3.1-8b", KEY, "acme", {"x-profile": "strict", "x-a": "1"})


def selection(*assignments: dict[str, Any], **more: Any) -> Selection:
    named = [{"name": f"a{i}", "policy": f"p{i}", **one} for i, one in enumerate(assignments)]
    return Selection.model_validate({"version": 1, "default": "base", "assignments": named, **more})


@pytest.mark.parametrize(
    ("match", "fit"),
    [
        ({}, True),
        ({"keys": [KEY]}, True),
        ({"keys": [OTHER_KEY]}, False),
        ({"keys": [OTHER_KEY, KEY]}, True),
        ({"tenants": ["acme"]}, True),
        ({"tenants": ["Acme"]}, False),
        ({"models": ["llama-*"]}, True),
        ({"models": ["LLAMA-*", "qwen*"]}, False),
        ({"routes": ["/v1/chat/completions"]}, True),
        ({"routes": ["/v1/completions"]}, False),
        ({"headers": {"x-profile": ["loose", "strict"]}}, True),
        ({"headers": {"x-profile": ["strict"], "x-a": ["2"]}}, False),
        ({"headers": {"x-none": ["1"]}}, False),
        ({"tenants": ["acme"], "models": ["qwen*"]}, False),
    ],
)
def test_every_field_that_is_given_must_fit_by_any_of_its_values(match: dict[str, Any], fit: bool) -> None:
    assert fits(Match.model_validate(match), FACTS) == fit


@pytest.mark.parametrize("name", ["a[b]", "a[!b]", "[a-c]", "a[", "]a[", "[[]", "a\nb", "a\\b"])
def test_in_a_models_name_only_a_star_and_a_question_mark_stand_for_others(name: str) -> None:
    for pattern in (name, f"{name}*", f"*{name[1:]}", f"?{name[1:]}"):
        assert fits(Match(models=(pattern,)), RequestFacts("r", "other", name))
    for other in ("ab", "a", "b", "a[", f"{name}x"):
        assert other == name or not fits(Match(models=(name,)), RequestFacts("r", "other", other))


def test_what_is_not_known_about_a_request_fits_nothing_that_asks_for_it() -> None:
    unknown = RequestFacts("r-1", "other")
    for match in ({"keys": [KEY]}, {"tenants": ["acme"]}, {"models": ["*"]}, {"headers": {"x-a": ["1"]}}):
        assert not fits(Match.model_validate(match), unknown)


def test_the_first_assignment_that_takes_a_request_decides() -> None:
    chosen = selection({"match": {"tenants": ["nobody"]}}, {"shadow": "s"}, {}, shadow="general")
    assert choose(chosen, FACTS) == Choice("p1", "s", "a1")
    assert choose(selection({"percent": 0}, {}, shadow="general"), FACTS) == Choice("p1", "general", "a1")
    assert choose(selection({"percent": 0}), FACTS) == Choice("base", None, None)


def test_pairs_are_all_that_a_request_may_get() -> None:
    chosen = selection({"shadow": "s"}, {}, {"policy": "p1"}, shadow="general")
    assert chosen.pairs == (("base", "general"), ("p0", "s"), ("p1", "general"))


@pytest.mark.parametrize("percent", [1, 10, 50])
@pytest.mark.parametrize("by", ["key", "request"])
def test_a_share_is_about_its_percentage(percent: float, by: str) -> None:
    chosen = selection({"percent": percent, "by": by})
    taken = sum(choose(chosen, RequestFacts(f"r-{i}", "x", key_hash=f"{i:064x}")).policy == "p0" for i in range(10_000))
    assert abs(taken / 100 - percent) < 2


@unhurried
@given(st.text(max_size=20), st.text(max_size=20), st.floats(0, 100), st.floats(0, 100))
def test_more_percent_keeps_those_that_were_in_and_a_choice_is_stable(
    key: str, request: str, one: float, other: float
) -> None:
    facts = RequestFacts(request, "x", key_hash=key)
    low, high = (choose(selection({"percent": p}), facts).policy == "p0" for p in sorted((one, other)))
    assert high or not low
    assert choose(selection({"percent": 100}), facts).policy == "p0"
    assert choose(selection({"percent": 0}), facts).policy == "base"


@unhurried
@given(st.text(min_size=1, max_size=20), st.floats(0, 100))
def test_a_share_of_keys_does_not_depend_on_the_request_and_without_keys_it_does(key: str, percent: float) -> None:
    chosen = selection({"percent": percent, "by": "key"})
    assert len({choose(chosen, RequestFacts(f"r-{i}", "x", key_hash=key)).policy for i in range(20)}) == 1
    assert {choose(selection({"percent": 50}), RequestFacts(f"{i}", "x")).policy for i in range(99)} == {"p0", "base"}


def test_two_assignments_draw_different_requests() -> None:
    def taken(name: str) -> list[bool]:
        chosen = selection({"name": name, "percent": 50})
        return [choose(chosen, RequestFacts(f"r-{i}", "x")).assignment is not None for i in range(1000)]

    same = sum(a == b for a, b in zip(taken("one"), taken("two"), strict=True))
    assert 400 < same < 600


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"match": {"keys": ["secret-key"]}}, "pattern"),
        ({"match": {"headers": {"authorization": ["Bearer x"]}}}, "holds a secret"),
        ({"match": {"headers": {"X-Profile": ["x"]}}}, "pattern"),
        ({"percent": 101}, "less than or equal to 100"),
        # Its requests would be taken for the playground's: replay leaves those out.
        ({"name": "console"}, "console's playground"),
    ],
)
def test_mistakes_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        selection(fields)
    with pytest.raises(ValidationError, match="share a name"):
        selection({"name": "a"}, {"name": "a"})


@pytest.mark.parametrize("named", RERANK)
def test_all_paths_of_one_route_match_together(named: str) -> None:
    assert fits(Match(routes=(named,)), RequestFacts("r-1", RERANK[0]))
    assert not fits(Match(routes=(named,)), FACTS)


@pytest.mark.parametrize(
    "route",
    ["/v1/chat/completion", "/v1/Chat/Completions", "v1/messages", "/v1/*", "/v1/models", "other", "/v1/messages/", ""],
)
def test_a_route_whose_requests_no_policy_judges_is_refused(route: str) -> None:
    with pytest.raises(ValidationError, match="no policy judges requests to"):
        Match(routes=(route,))
