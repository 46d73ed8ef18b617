"""A shadow policy reads the same prompt as the live one, in one request, and decides nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from guard.mia.results import HiddenReadout, Readout, Readouts
from guard.policy import BoundPolicy, bind
from guard.policy.judges import TooMuchError, judges
from guard.policy.measuring import Unplaced
from tests.policy.test_bound import Fake, load

LIVE = """\
version: 1
name: live
detectors:
  same: {kind: fake}
  mine: {kind: fake, spans: {data: user}}
rules:
  - {name: stop, when: {detector: same, at_least: 0.9}, action: block}
"""
SHADOW = """\
version: 1
name: candidate
detectors:
  other_name: {kind: fake}
  mine: {kind: fake, spans: {data: tool}}
rules:
  - {name: stop, when: {detector: other_name, at_least: 0.5}, action: block}
  - {name: watch, when: {detector: mine, at_least: 0.5}, action: flag, mode: shadow}
"""


def bound(tmp_path: Path, text: str) -> BoundPolicy:
    loaded = load(tmp_path, text)
    return bind(loaded, {name: Fake() for name in loaded.policy.detectors})


def readouts(**values: float) -> Readouts:
    items: dict[str, Readout] = {
        f"{key}.h": HiddenReadout("complete", 3, 5, 6, np.full(2, value, np.float32)) for key, value in values.items()
    }
    return Readouts(items)


def test_one_spec_asks_for_both_and_a_detector_that_they_share_is_measured_once(tmp_path: Path) -> None:
    both = judges(bound(tmp_path, LIVE), bound(tmp_path, SHADOW))
    asked = both.ask(("user",))
    assert set(asked.spec.hidden) == {"same.h", "mine.h", ".mine.h"}
    assert (asked.spec.spans["mine.data"], asked.spec.spans[".mine.data"]) == (("user",), ("tool",))


def test_each_policy_gets_the_scores_of_its_own_detectors(tmp_path: Path) -> None:
    both = judges(bound(tmp_path, LIVE), bound(tmp_path, SHADOW))
    items = readouts(same=0.7, mine=0.1)
    items.items[".mine.h"] = HiddenReadout("complete", 3, 5, 6, np.full(2, 0.8, np.float32))
    scores = both.scores(both.ask(("user",)), items)
    assert {name: round(score.value or 0, 2) for name, score in scores.live.items()} == {"same": 0.7, "mine": 0.1}
    assert {name: round(s.value or 0, 2) for name, s in scores.shadow.items()} == {"other_name": 0.7, "mine": 0.8}
    decision, shadow = both.decide(scores)
    assert shadow is not None
    assert (decision.action, shadow.action) == ("allow", "block")
    assert [(hit.rule, hit.mode) for hit in shadow.hits] == [("stop", "enforce"), ("watch", "shadow")]


@pytest.mark.parametrize("value", [0.0, 0.4, 0.6, 0.89, 0.9, 1.0])
def test_the_live_decision_is_the_same_with_and_without_a_shadow(tmp_path: Path, value: float) -> None:
    live, shadow = bound(tmp_path, LIVE), bound(tmp_path, SHADOW.replace("at_least: 0.5", "below: 2"))
    alone, beside = judges(live, None), judges(live, shadow)
    for items in (readouts(same=value, mine=1 - value), readouts(mine=value), None):
        decisions = [one.decide(one.scores(one.ask(("user",)), items, "none"))[0] for one in (alone, beside)]
        assert decisions[0] == decisions[1]


def test_an_answer_is_held_for_scores_of_the_live_policy_alone(tmp_path: Path) -> None:
    live, idle = bound(tmp_path, LIVE), bound(tmp_path, "version: 1\nname: idle\n")
    both = judges(live, bound(tmp_path, SHADOW))
    assert both.hold_s(both.ask(("user",))) == 30
    both = judges(idle, live)
    assert both.ask(("user",)).reads
    assert both.hold_s(both.ask(("user",))) == 0
    scoped = LIVE.replace("same: {kind: fake}", "same: {kind: fake, scope: tool}").replace(
        "mine: {kind: fake, spans: {data: user}}", "mine: {kind: fake, spans: {data: user}, scope: tool}"
    )
    both = judges(bound(tmp_path, scoped), bound(tmp_path, SHADOW))
    assert both.hold_s(both.ask(("user",))) == 0
    assert both.hold_s(both.ask(("user", "tool"))) == 30


@pytest.mark.parametrize(
    ("roles", "status"),
    [
        (("system", "user"), None),
        (("developer", "user"), None),
        (("user",), "not_applicable"),
        (("user", "assistant", "tool"), "not_applicable"),
        (("System", "user"), "unavailable"),
        (("user", "operator"), "unavailable"),
    ],
)
def test_no_name_of_a_role_takes_a_system_message_out_of_scope(
    tmp_path: Path, roles: tuple[str, ...], status: str | None
) -> None:
    scoped = LIVE.replace("same: {kind: fake}", "same: {kind: fake, scope: system}")
    known = judges(bound(tmp_path, scoped), None).ask(roles).known.get("same")
    assert (known.status if known else None) == status


def test_a_developers_message_is_where_a_span_of_the_systems_is(tmp_path: Path) -> None:
    spanned = LIVE.replace("data: user", "data: system")
    asking = judges(bound(tmp_path, spanned), None)
    assert asking.ask(("system", "user")).spec.spans["mine.data"] == ("system",)
    assert asking.ask(("developer", "user")).spec.spans["mine.data"] == ("message.0",)
    assert asking.ask(("system", "user", "developer")).spec.spans["mine.data"] == ("message.0", "message.2")


def test_what_is_missing_is_missing_for_both(tmp_path: Path) -> None:
    both = judges(bound(tmp_path, LIVE), bound(tmp_path, SHADOW))
    scores = both.scores(both.ask(("user",)), None, "late", timed_out=True)
    assert all(s.timed_out and s.reason == "late" for s in (*scores.live.values(), *scores.shadow.values()))


def test_a_shadow_that_measures_the_same_costs_nothing_more(tmp_path: Path) -> None:
    live = bound(tmp_path, LIVE)
    candidate = bound(tmp_path, LIVE.replace("name: live", "name: candidate").replace("0.9", "0.5"))
    assert judges(live, candidate).ask(()).spec == judges(live, None).ask(()).spec


def test_more_than_one_request_can_ask_for_is_refused_when_the_pair_is_made(tmp_path: Path) -> None:
    def many(name: str, role: str) -> BoundPolicy:
        uses = "".join(f"  d{i}: {{kind: fake, spans: {{data: {role}}}}}\n" for i in range(5))
        return bound(tmp_path, f"version: 1\nname: {name}\ndetectors:\n{uses}")

    with pytest.raises(TooMuchError, match="one with two beside it asks for more than one request can"):
        judges(many("one", "user"), many("two", "tool"))


SCOPED = """\
version: 1
name: scoped
detectors:
  end: {kind: fake}
  tools: {kind: fake, spans: {data: tool_results}}
  step: {kind: fake, scope: tool_results, spans: {data: user}}
  answers: {kind: fake, scope: assistant}
"""


@pytest.mark.parametrize(
    ("unplaced", "read", "unavailable"),
    [
        (Unplaced(), {"end", "tools"}, set()),
        # A scope has documents in it; a span cannot be said to.
        (Unplaced(documents="no place"), {"end", "step"}, {"tools"}),
        # Whatever the scope.
        (Unplaced(whole="raw"), set(), {"end", "tools", "step", "answers"}),
    ],
    ids=["a conversation", "documents beside it", "a raw prompt"],
)
def test_what_cannot_be_placed_in_a_prompt_is_unavailable_to_those_that_need_it_alone(
    tmp_path: Path, unplaced: Unplaced, read: set[str], unavailable: set[str]
) -> None:
    asked = judges(bound(tmp_path, SCOPED), None).ask(("user",), unplaced)
    assert {name.partition(".")[0] for name in asked.spec.hidden} == read
    assert {name for name, score in asked.known.items() if score.status == "unavailable"} == unavailable
