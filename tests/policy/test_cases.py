"""Tests beside a policy say what it must decide, and fail with what it decides instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from detectors import registry
from detectors.base import CapturePlan, Detector
from guard.data import data_folder
from guard.policy import PolicyError
from guard.policy.cases import Report, cases_beside, run_cases

POLICY = """\
version: 1
name: p
detectors:
  a: {kind: probe}
  b: {kind: probe, scope: tool_results}
rules:
  - {name: stop, when: {detector: a, at_least: high}, action: block, on_error: flag, on_timeout: allow}
  - {name: tools, when: {detector: b, at_least: 0.5}, action: flag, on_error: block}
  - {name: watch, when: {detector: a, at_least: 0.1}, action: block, mode: shadow, on_error: allow}
"""
HEAD = "version: 1\nthresholds: {a: {high: 0.9}}\ntests:\n"


def run(tmp_path: Path, rows: str, head: str = HEAD) -> Report:
    (tmp_path / "p.yaml").write_text(POLICY)
    (tmp_path / "p.tests.yaml").write_text(head + rows)
    return run_cases(cases_beside(tmp_path / "p.yaml"))


def test_rows_pass_whose_decisions_are_as_expected(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        """\
  - {name: at the threshold, scores: {a: high, b: 0.1}, expect: {action: block, rule: stop, flags: []}}
  - {name: below, scores: {a: 0.89, b: 0.1}, expect: {action: allow, would: block}}
  - {name: tools, scores: {a: 0, b: 0.5}, expect: {action: flag, flags: [tools]}}
  - {name: no score, scores: {a: unavailable, b: 0}, expect: flag}
  - {name: late, scores: {a: timeout, b: 0}, expect: {action: allow, rule: stop}}
  - {name: not named, scores: {a: 0}, expect: {action: block, rule: tools}}
  - {name: not applicable, scores: {a: 0, b: not_applicable}, expect: {action: allow, would: allow}}
  - {name: out of scope, roles: [user], scores: {a: 0, b: 1}, expect: allow}
  - {name: in scope, roles: [user, tool], scores: {a: 0, b: 1}, expect: flag}
""",
    )
    assert [outcome.failure for outcome in report.outcomes] == [None] * 9
    assert report.passed
    assert report.untested == ()


def test_behind_others_words_a_low_score_clears_nothing_as_for_requests(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        """\
  - {name: last, roles: [user, tool, assistant], scores: {a: 0.1, b: 0.1}, expect: {action: block, rule: tools}}
  - {name: system, roles: [user, system], scores: {a: 0.1, b: 0.1}, expect: {action: flag, rule: stop}}
  - {name: hit, roles: [user, tool, assistant], scores: {a: 0.95, b: 0.5}, expect: {action: block, rule: stop}}
  - {name: asked, roles: [user, assistant, user], scores: {a: 0.1, b: 0.1}, expect: {action: allow, would: block}}
""",
    )
    assert [outcome.failure for outcome in report.outcomes] == [None] * 4


def test_the_kinds_that_read_the_end_are_those_whose_shipped_files_say_so() -> None:
    read = set()
    for kind in registry.BUILT_IN:
        for file in sorted((data_folder("model_configs") / kind).glob("SmolLM2-135M-Instruct.json")):
            detector = registry.build_detector(kind, file)
            plan = detector.plan() if isinstance(detector, Detector) else CapturePlan()
            captures = (*plan.hidden.values(), *plan.attention.values(), *plan.probes.values())
            read |= {kind} if any(one.positions == "last_prompt" for one in captures) else set()
    assert read == registry.READ_THE_END


def test_thresholds_of_a_detector_that_is_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"p.tests.yaml:2: thresholds.other: the policy has no detector 'other'"):
        run(tmp_path, "  - {name: x, scores: {a: 0, b: 0}, expect: allow}\n", HEAD.replace("}}", "}, other: {x: 1}}"))


def test_a_row_that_fails_says_its_line_and_what_is_decided_instead(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        """\
  - {name: good, scores: {a: 0.95, b: 0}, expect: block}
  - {name: bad, scores: {a: 0.95, b: 0.9}, expect: {action: flag, rule: tools, flags: []}}
""",
    )
    assert not report.passed
    (bad,) = [outcome for outcome in report.outcomes if outcome.failure]
    assert (bad.case, bad.line) == ("bad", 5)
    assert bad.failure == (
        "action is block, not flag; rule is stop, not tools; flags is ('tools',), not () (a 0.95 >= 0.9 (high))"
    )


def test_a_rule_that_no_row_makes_hit_is_reported_and_on_error_is_no_hit(tmp_path: Path) -> None:
    rows = "  - {name: one, scores: {a: 0.5}, expect: {action: block, rule: tools}}\n"
    assert run(tmp_path, rows).untested == ("stop", "tools")


@pytest.mark.parametrize(
    ("rows", "head", "message"),
    [
        ("  - {name: x, scores: {c: 1}, expect: allow}\n", HEAD, "tests.yaml:4: tests.0.scores: the policy has no"),
        ("  - {name: x, scores: {a: low}, expect: allow}\n", HEAD, "4: tests.0.scores: 'low' is neither a number"),
        ("  - {name: x, scores: {a: true}, expect: allow}\n", HEAD, "tests.0.scores.a: must not be true"),
        ("  - {name: x, expect: alow}\n", HEAD, "p.tests.yaml:4: tests.0.expect"),
        ("  - {name: x, expect: allow}\n" * 2, HEAD, "tests share a name: x"),
        ("  - {name: x, expect: allow}\n", "version: 1\ntests:\n", "p.yaml:7: rules.0.when: a has no threshold 'high'"),
        ("  - {name: x, expect: allow}\n", "policy: q.yaml\n" + HEAD, "q.yaml: cannot be read"),
    ],
)
def test_a_table_that_cannot_be_run_is_refused_with_its_place(
    tmp_path: Path, rows: str, head: str, message: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        run(tmp_path, rows, head)
    assert message in str(caught.value)
