"""What is told of an answer from the scores that were kept of it is what was decided while it grew, or is not told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.base import Score
from guard.policy import BoundPolicy, load_policy
from guard.policy.compiled import compile_rules
from guard.policy.over_time import MAX_COMBINATIONS, Seen, Spread, decide_answer
from guard.policy.schema import SEVERITY
from tests.policy.test_policy_set import bind_fakes

HEAD = """\
version: 1
name: p
detectors:
  a: {kind: fake}
  b: {kind: fake}
rules:
"""
CONDITIONS = (
    "{detector: a, at_least: 0.5}",
    "{detector: a, below: 0.3}",
    "{detector: a, at_least: 0.3, below: 0.5}",
    "{all: [{detector: a, at_least: 0.5}, {detector: b, at_least: 0.5}]}",
    "{any: [{detector: a, at_least: 0.8}, {detector: b, below: 0.2}]}",
    "{not: {detector: a, at_least: 0.3}}",
    "{detector: b, status: unavailable}",
    "{all: [{detector: a, at_least: 0.2}, {not: {detector: b, at_least: 0.4}}]}",
)
scores = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.4, 0.5, 0.7, 0.9]).map(lambda value: Score("scored", value)) | (
    st.sampled_from(
        [
            Score("unavailable", reason="behind"),
            Score("unavailable", reason="late", timed_out=True),
            Score("not_applicable", reason="nothing yet"),
        ]
    )
)
moments = st.lists(
    st.lists(st.fixed_dictionaries({"a": scores, "b": scores}), min_size=1, max_size=2), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], BoundPolicy]:
    """Each condition at each stage."""
    folder, made = tmp_path_factory.mktemp("policies"), {}
    for stage in ("stream", "output"):
        for condition in CONDITIONS:
            path = folder / f"{len(made)}.yaml"
            rule = f"stage: {stage}, when: {condition}, action: block, on_error: flag, on_timeout: allow"
            path.write_text(f"{HEAD}  - {{name: r, {rule}}}\n")
            made[stage, condition] = bind_fakes(load_policy(path))
    return made


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["stream", "output"]), st.sampled_from(CONDITIONS), moments)
def test_what_is_sure_of_an_answer_is_what_was_decided(
    policies: dict[tuple[str, str], BoundPolicy],
    stage: str,
    condition: str,
    times: list[list[dict[str, Score]]],
) -> None:
    policy, seen = policies[stage, condition], Seen()
    for texts in times:
        seen.add(texts)
    judged = [one for texts in (times if stage == "stream" else times[-1:]) for one in texts]
    decisions = [policy.decide(one, "stream" if stage == "stream" else "output") for one in judged]
    live = max((one.action for one in decisions), key=lambda action: SEVERITY[action])
    outcome = decide_answer(policy.rules, seen.whole, seen.end)
    if not outcome.unsure:
        assert outcome.decision.action == live
    assert SEVERITY[outcome.decision.action] <= SEVERITY[live], "what hit for sure hit"


@pytest.mark.parametrize(
    ("condition", "times", "action", "unsure"),
    [
        (0, [(0.1, 0.1), (0.6, 0.1), (0.2, 0.1)], "block", False),
        (1, [(0.4, 0.1), (0.2, 0.1), (0.9, 0.1)], "block", False),
        # Between 0.1 and 0.9 it may have been in the band, or have jumped over it.
        (2, [(0.1, 0.1), (0.9, 0.1)], "allow", True),
        (2, [(0.1, 0.1), (0.4, 0.1)], "block", False),
        # Both were high once; whether they were so together is not kept.
        (3, [(0.9, 0.1), (0.1, 0.9)], "allow", True),
        (3, [(0.9, 0.9), (0.9, 0.6)], "block", False),
        (3, [(0.9, 0.1), (0.1, 0.1)], "allow", False),
        (4, [(0.1, 0.9), (0.1, 0.1)], "block", False),
    ],
)
def test_what_is_not_known_is_said_to_be(
    policies: dict[tuple[str, str], BoundPolicy],
    condition: int,
    times: list[tuple[float, float]],
    action: str,
    unsure: bool,
) -> None:
    seen = Seen()
    for a, b in times:
        seen.add([{"a": Score("scored", a), "b": Score("scored", b)}])
    outcome = decide_answer(policies["stream", CONDITIONS[condition]].rules, seen.whole, seen.end)
    assert (outcome.decision.action, outcome.unsure) == (action, ("r",) if unsure else ())


def test_a_rule_of_more_scores_than_can_be_looked_through_is_unsure(tmp_path: Path) -> None:
    names = [f"d{i}" for i in range(14)]
    assert 2 ** len(names) > MAX_COMBINATIONS
    kinds = "".join(f"  {name}: {{kind: fake}}\n" for name in names)
    any_of = ", ".join(f"{{detector: {name}, at_least: 0.9}}" for name in names)
    text = f"version: 1\nname: p\ndetectors:\n{kinds}rules:\n"
    (tmp_path / "p.yaml").write_text(
        f"{text}  - {{name: r, stage: stream, when: {{any: [{any_of}]}}, action: block}}\n"
    )
    spread = Spread().also(Score("scored", 0.1)).also(Score("scored", 0.2))
    rules = compile_rules(load_policy(tmp_path / "p.yaml"), {})
    assert decide_answer(rules, dict.fromkeys(names, spread), None).unsure == ("r",)
