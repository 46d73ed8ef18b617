"""A candidate policy decides on the scores of a ledger as it would have live, and guesses no score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.base import Score
from guard.policy import BoundPolicy, load_policy
from guard.policy.explain import explain, explain_record
from guard.policy.recorded import Recorded, find_request, read_ledger
from guard.policy.replay import Replayed, RuleAlone, replay
from guard.policy.replay_summary import summary
from guard.policy.selection import PLAYGROUND
from guard.policy.way import way_of
from guard.telemetry.ledger_reader import LedgerReadError
from guard.telemetry.record import Beside, RequestRecord
from tests.policy.test_policy_set import bind_fakes

POLICY = """\
version: 1
name: p
detectors:
  a: {kind: fake}
  b: {kind: fake, spans: {data: tool}}
rules:
  - {name: stop, when: {detector: a, at_least: 0.9}, action: block, on_error: flag, on_timeout: block}
  - {name: watch, when: {detector: b, at_least: 0.5}, action: flag, on_error: allow}
"""
LATE = Score("unavailable", reason="late", timed_out=True)


def bound(tmp_path: Path, text: str = POLICY, name: str = "p.yaml") -> BoundPolicy:
    (tmp_path / name).write_text(text)
    return bind_fakes(load_policy(tmp_path / name))


def line(policy: BoundPolicy, request_id: str, shadow: BoundPolicy | None = None, **scores: Score | float) -> str:
    """A line as the proxy writes it."""
    given = {name: one if isinstance(one, Score) else Score("scored", one) for name, one in scores.items()}
    record = RequestRecord("/v1/chat/completions", policy.name, policy.hash, request_id)
    record.scores = {name: one for name, one in given.items() if name in policy.detectors}
    record.waits = policy.waits
    record.measured, record.decision = policy.digests, policy.decide(record.scores)
    if shadow is not None:
        beside = {name: one for name, one in given.items() if name in shadow.detectors}
        record.shadow = Beside(shadow.name, shadow.hash, beside, shadow.digests, shadow.decide(beside))
    return json.dumps(record.to_entry())


def replayed(tmp_path: Path, lines: list[str], candidate: str) -> Replayed:
    (tmp_path / "ledger.jsonl").write_text("".join(f"{one}\n" for one in lines))
    policy = bound(tmp_path, candidate, "candidate.yaml")
    return replay(load_policy(tmp_path / "candidate.yaml"), policy.rules, read_ledger(tmp_path / "ledger.jsonl"))


def test_the_same_policy_changes_nothing_on_its_own_ledger_whatever_the_scores_were(tmp_path: Path) -> None:
    policy = bound(tmp_path)
    lines = [
        line(policy, "r1", a=0.95, b=0.1),
        line(policy, "r2", a=0.1, b=0.6),
        line(policy, "r3", a=LATE, b=LATE),
        line(policy, "r4", a=Score("unavailable", reason="no taps: none"), b=0.2),
        line(policy, "r5", a=0.2, b=Score("not_applicable", reason="out of scope")),
    ]
    result = replayed(tmp_path, lines, POLICY)
    assert (result.compared, result.changed(), result.incomplete) == (5, 0, 0)
    assert dict(result.unchanged) == {"block": 2, "flag": 2, "allow": 1}


def test_changes_are_counted_by_direction_rule_and_example(tmp_path: Path) -> None:
    policy = bound(tmp_path)
    lines = [line(policy, f"r{i}", a=i / 10, b=0.0) for i in range(10)]
    result = replayed(tmp_path, lines, POLICY.replace("at_least: 0.9", "at_least: 0.7"))
    assert (result.changed(), result.changed("stricter"), result.changed("looser")) == (2, 2, 0)
    (change,) = result.changes.values()
    assert (change.before, change.after, change.examples) == ("allow", "block", ["r7", "r8"])
    assert dict(change.rules) == {"stop": 2}
    assert result.percent() == pytest.approx(20)
    assert summary(result)[1] == "  allow -> block: 2 (stop 2), such as r7, r8"
    looser = replayed(tmp_path, lines, POLICY.replace("action: block", "action: flag"))
    assert (looser.changed("looser"), looser.percent("stricter")) == (1, 0)


def timed(text: str, took_s: float, *, waits: bool = True) -> str:
    """A line with how long the prompt's scores took, and, by newer versions, how long they were waited for."""
    entry = json.loads(text)
    entry["timings_ms"] = {**entry["timings_ms"], "verdict": took_s * 1000, "total": took_s * 1000 + 500}
    return json.dumps(entry if waits else {name: one for name, one in entry.items() if name != "waits"})


SHORTER = POLICY.replace("name: p", "name: p\nprompt_timeout_s: 2")


@pytest.mark.parametrize("waits", [True, False], ids=["told", "older"])
@pytest.mark.parametrize(
    ("candidate", "took_s", "scores", "told"),
    [
        (SHORTER, 1, {"a": 0.95, "b": 0.6}, True),
        (SHORTER, 3, {"a": 0.95, "b": 0.6}, False),
        (SHORTER, 30, {"a": LATE, "b": LATE}, True),
        # A block outranks whatever b would have said.
        (SHORTER, 3, {"a": LATE, "b": 0.6}, True),
        (POLICY.replace("on_timeout: block}", "on_timeout: block, timeout_s: 2}"), 3, {"a": 0.1, "b": 0.6}, False),
        (POLICY.replace("name: p", "name: p\nprompt_timeout_s: 60"), 30.001, {"a": LATE, "b": 0.6}, False),
        (POLICY.replace("name: p", "name: p\nprompt_timeout_s: 60"), 29, {"a": 0.1, "b": 0.6}, True),
        (POLICY.replace("name: p", "name: q"), 30.001, {"a": LATE, "b": LATE}, True),
    ],
)
def test_a_score_that_may_not_have_come_in_the_candidates_time_is_never_unchanged(
    tmp_path: Path, candidate: str, took_s: float, scores: dict[str, Score | float], told: bool, waits: bool
) -> None:
    lines = [timed(line(bound(tmp_path), "r1", **scores), took_s, waits=waits)]
    result = replayed(tmp_path, lines, candidate)
    assert (result.compared, result.changed(), result.incomplete) == ((1, 0, 0) if told else (0, 0, 1))
    assert told or any("would have come in time" in one for one in summary(result))
    # Of the policy itself nothing is in doubt.
    assert replayed(tmp_path, lines, POLICY).compared == 1


def test_an_answer_that_no_rule_judged_is_told_from_one_that_was_measured_otherwise(tmp_path: Path) -> None:
    lines = [json.dumps(json.loads(line(bound(tmp_path), "r1", a=0.1, b=0.2)) | {"outcome": "completed"})]
    after = POLICY + "  - {name: out, stage: output, when: {detector: a, at_least: 0.5}, action: flag}\n"
    result = replayed(tmp_path, lines, after)
    assert (dict(result.not_measured), dict(result.unjudged), dict(result.otherwise)) == ({"a": 1}, {"a": 1}, {})
    assert "    a: of 1 the answer was not judged" in summary(result)
    assert result.to_json()["answers_unjudged"] == {"a": 1}


def test_a_longer_or_the_same_wait_changes_nothing_however_long_it_took(tmp_path: Path) -> None:
    lines = [timed(line(bound(tmp_path), "r1", a=0.1, b=LATE), 35)]
    other = POLICY.replace("name: p", "name: q")
    assert replayed(tmp_path, lines, other).compared == 1
    longer = [timed(line(bound(tmp_path), "r1", a=0.1, b=0.6), 35)]
    assert replayed(tmp_path, longer, other.replace("name: q", "name: q\nprompt_timeout_s: 40")).compared == 1


def test_a_detector_that_measures_otherwise_under_the_same_name_is_not_compared(tmp_path: Path) -> None:
    lines = [line(bound(tmp_path), "r1", a=0.5, b=0.1)]
    result = replayed(tmp_path, lines, POLICY.replace("data: tool", "data: user"))
    assert (result.compared, result.incomplete, dict(result.not_measured)) == (0, 1, {"b": 1})
    assert "lack a score as this policy measures it: b 1" in summary(result)[1]


def test_what_can_be_compared_is_and_what_cannot_is_told_rule_by_rule(tmp_path: Path) -> None:
    """As a stricter policy on another's ledger, whose one detector it uses with another scope."""
    lines = [line(bound(tmp_path), f"r{i}", a=i / 10, b=0.0) for i in range(10)]
    candidate = POLICY.replace("data: tool}", "data: tool}, scope: tool").replace("0.9}", "0.7}")
    result = replayed(tmp_path, lines, candidate)
    # A block outranks whatever the flag of the other rule says.
    assert (result.compared, result.outranked, result.incomplete) == (3, 3, 7)
    assert (result.changed("stricter"), dict(result.unchanged)) == (2, {"block": 1})
    assert (dict(result.not_measured), dict(result.otherwise)) == ({"b": 7}, {"b": 7})
    assert result.alone == {"stop": RuleAlone(7)}
    assert result.never_measured == ("b",)
    told = "\n".join(summary(result))
    for words in (
        "3 of those compared lack a score, which could not have changed what is done",
        "b: 7 have one of this name, of another kind, spans, scope, inputs or file",
        "rule stop, by itself, hits 0 of 7",
        "no line has a score of b",
    ):
        assert words in told
    lax = replayed(tmp_path, lines, candidate.replace("action: flag, on_error: allow", "action: block, mode: shadow"))
    assert (lax.compared, lax.never_measured) == (10, ())
    severe = replayed(tmp_path, lines, candidate.replace("action: flag, on_error: allow", "action: block"))
    assert (severe.compared, severe.incomplete) == (0, 10)
    assert severe.alone["stop"].hits == {"allow": 2, "block": 1}


def test_scores_of_another_file_of_the_model_are_no_scores_of_this_one(tmp_path: Path) -> None:
    entry = json.loads(line(bound(tmp_path), "r1", a=0.95, b=0.1))
    entry["measured"] = {name: f"{digest}+old" for name, digest in entry["measured"].items()}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(entry) + "\n")
    policy, loaded = bound(tmp_path), load_policy(tmp_path / "p.yaml")
    for files, compared in ((None, 1), ({"a": "old", "b": "old"}, 1), ({"a": "new", "b": None}, 0)):
        result = replay(loaded, policy.rules, read_ledger(tmp_path / "ledger.jsonl"), files=files)
        assert result.compared == compared, files
    assert dict(result.otherwise) == {"a": 1}


def test_the_same_measurement_is_found_under_any_name_and_in_the_shadows_scores(tmp_path: Path) -> None:
    shadow = bound(tmp_path, POLICY.replace("name: p", "name: s").replace("b: {kind", "c: {kind").replace(
        "data: tool", "data: user").replace("detector: b", "detector: c"))  # fmt: skip
    lines = [line(bound(tmp_path), "r1", shadow, a=0.95, b=0.1, c=0.7)]
    candidate = POLICY.replace("b: {kind", "x: {kind").replace("data: tool", "data: user").replace(
        "detector: b", "detector: x").replace("0.9}", "0.99}")  # fmt: skip
    result = replayed(tmp_path, lines, candidate)
    assert result.changes["block", "flag"].requests == 1


def test_lines_without_a_decision_and_lines_that_are_no_entry_are_counted_apart(tmp_path: Path) -> None:
    policy = bound(tmp_path)
    undecided = json.dumps(RequestRecord("other", policy.name, policy.hash, "r0").to_entry())
    result = replayed(tmp_path, [undecided, '{"half', "[]", "3", line(policy, "r1", a=0.1, b=0.1)], POLICY)
    assert (result.compared, result.undecided, result.unreadable) == (1, 1, 3)


def test_requests_that_other_policies_judged_can_be_left_out(tmp_path: Path) -> None:
    lines = [
        line(bound(tmp_path), "r1", a=0.1, b=0.1),
        line(bound(tmp_path, POLICY.replace("p\n", "q\n", 1)), "r2", a=1, b=0),
    ]
    (tmp_path / "ledger.jsonl").write_text("\n".join(lines))
    policy = bound(tmp_path)
    entries = read_ledger(tmp_path / "ledger.jsonl")
    result = replay(load_policy(tmp_path / "p.yaml"), policy.rules, entries, "q")
    assert (result.compared, result.others, dict(result.unchanged)) == (1, 1, {"block": 1})


def test_lines_of_a_version_that_wrote_no_measurements_are_compared_by_name(tmp_path: Path) -> None:
    entry = json.loads(line(bound(tmp_path), "r1", a=0.95, b=0.1))
    for field in ("measured", "timed_out", "shadow", "assignment", "armed", "gates"):
        del entry[field]
    assert replayed(tmp_path, [json.dumps(entry)], POLICY).unchanged == {"block": 1}


scores = st.floats(0, 1).map(lambda v: Score("scored", v)) | st.sampled_from(
    [LATE, Score("unavailable", reason="a: b"), Score("not_applicable", reason="none")]
)


@settings(deadline=None, max_examples=50)
@given(scores, scores)
def test_what_the_ledger_says_about_scores_is_what_was_decided_on(
    tmp_path_factory: pytest.TempPathFactory, a: Score, b: Score
) -> None:
    folder = tmp_path_factory.getbasetemp()
    policy = bound(folder)
    (folder / "one.jsonl").write_text(line(policy, "r", a=a, b=b) + "\n")
    entry = find_request(folder / "one.jsonl", "r")
    assert entry.scores == {"a": a, "b": b}
    assert policy.decide(entry.scores) == policy.decide({"a": a, "b": b})


def test_a_request_is_explained_rule_by_rule_with_what_was_recorded(tmp_path: Path) -> None:
    policy = bound(tmp_path)
    (tmp_path / "l.jsonl").write_text(line(policy, "r1", a=0.95, b=LATE) + "\n")
    entry = find_request(tmp_path / "l.jsonl", "r1")
    assert explain_record(entry) == [
        f"request r1: policy {policy.label}, by the default",
        "recorded: block, rule stop: a 0.95 >= 0.9",
    ]
    assert explain(policy.rules, entry.scores) == [
        "scores:",
        "  a: 0.95",
        "  b: timeout (late)",
        "rules:",
        "  stop (block, severity 95): hit: a 0.95 >= 0.9 <- decides",
        "  watch (on_error allow): unknown: b unavailable: late",
        "decision: block, by rule stop: a 0.95 >= 0.9",
    ]


def test_what_gates_did_is_explained_as_it_was_recorded(tmp_path: Path) -> None:
    entry = json.loads(line(bound(tmp_path), "r1", a=0.1, b=0.1))
    told = {"choices": 3, "opened": 2, "first_at": 12, "reason": ""}
    entry["gates"] = {"calm": told, "cold": {**told, "opened": 0, "first_at": None, "reason": "no probe"}}
    (tmp_path / "l.jsonl").write_text(json.dumps(entry) + "\n")
    assert explain_record(find_request(tmp_path / "l.jsonl", "r1"))[2:] == [
        "gate of rule calm: opened in 2 of 3 choices, first at token 12",
        "gate of rule cold: stayed shut: no probe",
    ]


def test_a_request_or_ledger_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerReadError, match=r"nowhere\.jsonl: cannot be read"):
        find_request(tmp_path / "nowhere.jsonl", "r")
    (tmp_path / "l.jsonl").write_text("{}\n")
    with pytest.raises(LedgerReadError, match="has no request 'r'"):
        find_request(tmp_path / "l.jsonl", "r")


def test_a_recorded_score_is_only_a_name_where_nothing_says_what_was_measured() -> None:
    score = Score("scored", 0.5)
    old = Recorded("r", None, "p@0", "allow", None, None, None, {"a": score}, {}, {})
    assert old.score("a", "probe@1") is score
    new = Recorded("r", None, "p@0", "allow", None, None, None, {"a": score}, {"a": "probe@2"}, {"probe@2": score})
    assert (new.score("a", "probe@1"), new.score("z", "probe@2")) == (None, score)


CHANGES = """\
version: 1
name: p
detectors: {a: {kind: fake}}
rules:
  - {name: clean, when: {detector: a, at_least: 0.5}, action: redact,
     redact: {messages: [user.last], replacement: gone}}
  - {name: hide, when: {detector: a, at_least: 0.5}, action: redact,
     redact: {messages: [tool_results], replacement: hidden}}
  - {name: move, when: {detector: a, at_least: 0.8}, action: route, route: {model: calm}}
  - {name: stop, when: {detector: a, at_least: 0.97}, action: block, respond: refusal, message: Not this.}
  - {name: end, when: {detector: a, at_least: 0.99}, action: block, severity: 99}
"""


@pytest.mark.parametrize(
    ("before", "after", "unjudged"),
    [
        ("user.last", "user.first", 2),
        ("gone", "away", 2),
        ("hidden", "unseen", 2),
        ("model: calm", "model: cold", 1),
        ("respond: refusal", "respond: error", 1),
        ("Not this.", "Nor that.", 1),
        ("action: block, severity", "action: block, respond: refusal, severity", 1),
        ("at_least: 0.5", "at_least: 0.55", 0),
        ("name: clean", "name: scrub", 0),
    ],
)
def test_another_way_of_the_same_action_is_not_judged(tmp_path: Path, before: str, after: str, unjudged: int) -> None:
    policy = bound(tmp_path, CHANGES)
    lines = []
    for request_id, score in (("r1", 0.6), ("r2", 0.9), ("r3", 0.1), ("r4", 0.98), ("r5", 1.0)):
        entry = json.loads(line(policy, request_id, a=score))
        decision = policy.decide({"a": Score("scored", score)})
        assert entry["prompt_action"] == decision.action
        lines.append(json.dumps(entry | {"prompt_way": way_of(policy.rules, decision)}))
    result = replayed(tmp_path, lines, CHANGES.replace(before, after))
    assert (result.not_judged.total(), result.changed()) == (unjudged, 0)
    old = [json.dumps({name: one for name, one in json.loads(each).items() if name != "prompt_way"}) for each in lines]
    assert replayed(tmp_path, old, CHANGES).not_judged.total() == 0
    assert replayed(tmp_path, old, CHANGES.replace(before, after)).not_judged.total() >= 2


def test_runs_of_the_playground_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    tried = json.dumps(json.loads(line(bound(tmp_path), "r2", a=0.1, b=0.1)) | {"assignment": PLAYGROUND})
    result = replayed(tmp_path, [line(bound(tmp_path), "r1", a=0.95, b=0.1), tried], POLICY)
    assert (result.compared, result.playground) == (1, 1)
    assert "  1 runs of the console's playground are left out (--playground)" in summary(result)
    policy = bound(tmp_path)
    entries = read_ledger(tmp_path / "ledger.jsonl")
    assert replay(load_policy(tmp_path / "p.yaml"), policy.rules, entries, playground=True).compared == 2
