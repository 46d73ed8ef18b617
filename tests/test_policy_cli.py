"""``guard policy …`` as a user calls it: what is printed, and the exit codes that CI goes by."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from detectors import registry
from detectors.base import AnyDetector
from detectors.model_config import ModelConfigError
from guard import help_texts
from guard.cli import app
from guard.data import data_folder
from guard.telemetry.record import RequestRecord
from tests.policy.test_replay import POLICY, bound, line


def guard(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["policy", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(path: Path) -> AnyDetector:
        raise ModelConfigError(f"{path}: there is no such file")

    monkeypatch.setitem(registry.BUILT_IN, "fake", none)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "p.yaml").write_text(POLICY)
    return tmp_path / "p.yaml"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    live = bound(tmp_path)
    lines = [line(live, f"r{i}", a=i / 10, b=0.0) for i in range(10)]
    (tmp_path / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "ledger.jsonl"


def test_lint_checks_files_of_every_kind_and_folders_as_a_whole(policy: Path) -> None:
    folder = policy.parent
    (folder / "selection.yaml").write_text("version: 1\ndefault: p\n")
    (folder / "p.tests.yaml").write_text("version: 1\ntests: [{name: x, expect: flag}]\n")
    done = guard("lint", *sorted(folder.glob("*.yaml")), folder)
    assert done.exit_code == 0, done.output
    told = [text.split(": ")[1].split(" (")[0] for text in done.output.splitlines()]
    # Of two detectors of a kind of which nothing is there, in the policy by itself and in the folder.
    assert (told.count("ok"), told.count("note"), len(told)) == (7, 4, 12)
    (folder / "selection.yaml").write_text("version: 1\ndefault: q\n")
    done = guard("lint", folder)
    assert done.exit_code == 1
    assert "no policy is called 'q'; there are: p" in done.output


def test_lint_without_a_model_checks_the_files_that_a_policy_names_and_says_what_it_left_out(tmp_path: Path) -> None:
    configs, path = data_folder("model_configs"), tmp_path / "p.yaml"
    (tmp_path / "configs").symlink_to(configs)
    (tmp_path / "words.json").write_text("[1, 2]")

    def lint(use: str, at_least: str = "0.5", more: str = "action: block") -> tuple[int, str]:
        rule = f"{{name: r, when: {{detector: a, at_least: {at_least}}}, {more}}}"
        path.write_text(f"version: 1\nname: p\ndetectors:\n  a: {use}\nrules: [{rule}]\n")
        done = guard("lint", path)
        return done.exit_code, done.output

    named = "{kind: probe, config: configs/probe/SmolLM2-135M-Instruct.json}"
    for use, at_least, said in (
        ("{kind: probe, config: gone.json}", "0.5", "gone.json: No such file or directory"),
        ("{kind: probe, config: words.json}", "0.5", "p.yaml:4: detectors.a.config: "),
        (named.replace("kind: probe", "kind: h_node"), "0.5", "p.yaml:4: detectors.a.config: "),
        (named, "fpr_7pct", "has no threshold 'fpr_7pct'"),
        (named.replace("}", ", spans: {data: [user]}}"), "0.5", "p.yaml:4: detectors.a.spans: "),
        ("{kind: text_baseline, config: SmolLM2-135M-Instruct}", "fpr_7pct", "has no threshold 'fpr_7pct'"),
    ):
        code, output = lint(use, at_least)
        assert (code, said in output) == (1, True), output
    rest = "not checked without --model: "
    for use, at_least, more, left in (
        (named, "fpr_1pct", "action: block", "layers, heads and width of what is read inside"),
        ("{kind: probe}", "fpr_7pct", "action: block", "files of probe, with their named thresholds and spans"),
        ("{kind: text_baseline, config: SmolLM2-135M-Instruct}", "fpr_1pct", "action: block", ""),
        ("{kind: text_baseline, config: SmolLM2-135M-Instruct}", "fpr_1pct",
         "action: steer, steer: [{vector: x, layer: 1, coefficient: 1}]", "steering vectors"),
    ):  # fmt: skip
        code, output = lint(use, at_least, more)
        assert code == 0, output
        assert output.splitlines()[1:] == ([rest + left] if left else [])
    for use, said in (
        (
            "{kind: text_baseline, config: NoSuchModel}",
            f"note: detector a: {configs / 'text_baseline' / 'NoSuchModel.json'} is not there",
        ),
        ("{kind: fake}", "note: detector a: no model has a file of fake in"),
    ):
        code, output = lint(use)
        assert (code, said in output) == (0, True), output
    code, output = lint("{kind: text_baseline, config: gone.json, optional: true}")
    assert (code, f"{tmp_path / 'gone.json'} is not there" in output) == (0, True), output
    assert rest not in guard("lint", path, "--model", "SmolLM2-135M-Instruct").output


def test_lint_counts_the_inputs_of_a_combination_as_used(policy: Path) -> None:
    uses = "{spare: {kind: probe}, both: {kind: combination, inputs: {probe: spare}}}"
    rule = "{name: r, when: {detector: both, at_least: 0.5}, action: block}"
    policy.write_text(f"version: 1\nname: p\ndetectors: {uses}\nrules: [{rule}]\n")
    done = guard("lint", policy)
    assert (done.exit_code, "no rule uses it" in done.output) == (0, False)


def test_lint_says_which_detector_no_rule_uses_and_what_comes_too_late(policy: Path) -> None:
    policy.write_text(POLICY.replace("detectors:\n", "detectors:\n  spare: {kind: probe}\n"))
    assert "note: detector spare is measured, and no rule uses it" in guard("lint", policy).output
    late = POLICY.replace("action: flag", "action: redact, stage: stream, redact: {}")
    policy.write_text(late.replace("detectors:\n", "streaming: observe\ndetectors:\n"))
    done = guard("lint", policy)
    assert done.exit_code == 1
    assert "action redact at stage stream comes too late with streaming observe" in done.output


def test_tests_beside_a_policy_run_and_their_failures_are_the_exit_code(policy: Path) -> None:
    tests = policy.with_name("p.tests.yaml")
    tests.write_text("version: 1\ntests: [{name: high, scores: {a: 1, b: 0}, expect: block}]\n")
    for argument in (policy, tests, policy.parent):
        done = guard("test", argument)
        assert (done.exit_code, "1 of 1 passed" in done.output) == (0, True), done.output
        assert "no test makes these rules hit: watch" in done.output
    tests.write_text("version: 1\ntests: [{name: high, scores: {a: 1, b: 0}, expect: allow}]\n")
    done = guard("test", policy)
    assert done.exit_code == 1
    assert f"{tests}:2: FAILED high: action is block, not allow (a 1 >= 0.9)" in done.output


def test_without_tests_there_is_nothing_to_pass(policy: Path) -> None:
    assert guard("test", policy).exit_code == 2
    assert guard("test", policy.parent).exit_code == 2


def test_explain_shows_the_rules_of_given_scores_and_of_a_recorded_request(policy: Path, ledger: Path) -> None:
    done = guard("explain", policy, "--score", "a=0.95", "--score", "b=timeout")
    assert done.exit_code == 0, done.output
    assert "stop (block, severity 95): hit: a 0.95 >= 0.9 <- decides" in done.output
    assert "watch (on_error allow): unknown: b unavailable: given" in done.output
    done = guard("explain", policy, "--request", "r9", "--ledger", ledger)
    assert "recorded: block, rule stop: a 0.9 >= 0.9" in done.output
    assert "decision: block, by rule stop" in done.output
    for bad in ("z=1", "a=x", "a=nan", "a=-inf"):
        assert guard("explain", policy, "--score", bad).exit_code == 2
    assert guard("explain", policy, "--request", "r99", "--ledger", ledger).exit_code == 2


def test_named_thresholds_need_no_model_where_the_file_is_named_and_no_short_name_where_the_folder_has_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "configs").symlink_to(data_folder("model_configs"))
    ledger = tmp_path / "empty.jsonl"
    ledger.write_text("")
    key = "SmolLM2-135M-Instruct"
    use = f"{{kind: probe, config: {tmp_path / 'configs' / 'probe' / key}.json}}"
    for kind, options in ((use, ()), ("{kind: probe}", ("--model", key, "--model-configs", tmp_path / "configs"))):
        policy = tmp_path / "named.yaml"
        rule = "{name: r, when: {detector: a, at_least: fpr_1pct}, action: block}"
        policy.write_text(f"version: 1\nname: p\ndetectors: {{a: {kind}}}\nrules: [{rule}]\n")
        done = guard("explain", policy, "--score", "a=1", *options)
        assert "decision: block, by rule r" in done.output
        assert "no request could be compared" in guard("replay", policy, "--ledger", ledger, *options).output


def test_lint_finds_rules_that_never_hit_and_versions_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "version: true\nname: p\ndetectors: {a: {kind: probe}}\nrules:\n"
        "  - {name: r, when: {detector: a, at_least: 0.9, below: 0.2}, action: block}\n"
    )
    done = guard("lint", tmp_path / "p.yaml")
    assert done.exit_code == 1
    assert "p.yaml:1: version: must not be true" in done.output
    assert "p.yaml:5: rules.0.when: no score of a is at least 0.9 and below 0.2" in done.output
    (tmp_path / "p.yaml").write_text(
        "version: 1\nname: p\ndetectors: {a: {kind: probe}}\nrules:\n"
        "  - {name: r, when: {not: {detector: a, at_least: 95}}, action: block}\n"
    )
    assert "note: rule r: a never scores 95" in guard("lint", tmp_path / "p.yaml").output
    (tmp_path / "p.yaml").write_text(
        "version: 1\nname: p\ndetectors: {a: {kind: probe}, t: {kind: attention_tracker}}\nrules:\n"
        "  - {name: r, when: {detector: a, below: 0}, action: block}\n"
        "  - name: s\n    when: {detector: t, at_least: 0.5}\n    action: steer\n"
        "    steer: [{vector: v, layer: 3, coefficient: 1, phase: decode}]\n"
        "    gate: {detector: t, span: data, above: 2}\n"
    )
    told = guard("lint", tmp_path / "p.yaml").output
    assert "note: rule r: a never scores below 0" in told
    assert "note: rule s: its gate never opens" in told
    for kind in ("nosuch", "probes"):
        (tmp_path / "kind.yaml").write_text(POLICY.replace("kind: fake", f"kind: {kind}", 1))
        done = guard("lint", tmp_path / "kind.yaml")
        assert done.exit_code == 1
        assert f"no detector of kind {kind!r}" in done.output
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "is no file" in guard("lint", tmp_path / "pipe.yaml").output


def test_diff_has_the_exit_code_of_diff(policy: Path) -> None:
    other = policy.with_name("q.yaml")
    other.write_text(POLICY.replace("0.9}", "0.8}"))
    assert guard("diff", policy, policy).exit_code == 0
    done = guard("diff", policy, other)
    assert (done.exit_code, done.output) == (1, "~ rules.stop.when.at_least: 0.9 -> 0.8\n")
    assert guard("diff", policy, policy.with_name("none.yaml")).exit_code == 2


@pytest.mark.parametrize(
    ("threshold", "options", "code"),
    [
        ("0.9", (), 0),
        ("0.75", (), 1),
        ("0.75", ("--fail-on", "looser"), 0),
        ("0.75", ("--fail-on", "stricter"), 1),
        ("0.75", ("--max-percent", "10"), 0),
        ("0.75", ("--max-percent", "9.9"), 1),
        ("0.95", ("--fail-on", "looser"), 1),
    ],
)
def test_replay_fails_when_more_changes_than_allowed(
    policy: Path, ledger: Path, threshold: str, options: tuple[str, ...], code: int
) -> None:
    policy.write_text(POLICY.replace("at_least: 0.9", f"at_least: {threshold}"))
    done = guard("replay", policy, "--ledger", ledger, *options)
    assert done.exit_code == code, done.output
    assert "10 requests compared" in done.output
    as_json = json.loads(guard("replay", policy, "--ledger", ledger, "--json").stdout)
    assert (as_json["compared"], as_json["changed"]) == (10, 0 if threshold == "0.9" else 1)


def test_replay_of_nothing_is_no_success(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for ledger, code in (("empty.jsonl", 4), ("none.jsonl", 2)):
        for options in ((), ("--allow-unjudged",), ("--json",)):
            assert guard("replay", policy, "--ledger", tmp_path / ledger, *options).exit_code == code


def test_replay_on_another_policys_ledger_says_what_it_could_compare_and_is_no_success(
    policy: Path, ledger: Path
) -> None:
    policy.write_text(POLICY.replace("a: {kind: fake}", "a: {kind: fake, scope: system}"))
    done = guard("replay", policy, "--ledger", ledger)
    assert done.exit_code == 4
    assert "no request could be compared" in done.output
    assert "10 requests lack a score as this policy measures it: a 10" in done.output
    assert "a: 10 have one of this name, of another kind, spans, scope, inputs or file" in done.output
    assert "rule watch, by itself, hits 0 of 10" in done.output
    policy.write_text(POLICY.replace("b: {kind: fake", "b: {kind: fake, scope: system"))
    for options, code in (((), 3), (("--allow-unjudged",), 0)):
        done = guard("replay", policy, "--ledger", ledger, *options)
        assert (done.exit_code, "no line has a score of b" in done.output) == (code, True), done.output
    lines = ledger.read_text().splitlines()
    for most, code in ((lines[:4], 0), (lines[:3], 3)):
        other = [one.replace("fake@", "fake@0") for one in lines[4:8]]
        ledger.write_text("\n".join([*most, *other]) + "\n")
        policy.write_text(POLICY)
        done = guard("replay", policy, "--ledger", ledger)
        assert (done.exit_code, f"{len(most)} requests compared" in done.output) == (code, True), done.output


def test_a_threshold_by_name_needs_a_model_and_is_then_its_number(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nname: mine\nextends: shipped:default\n")
    done = guard("explain", path, "--score", "injection=0.99")
    assert done.exit_code == 2
    assert "injection has no threshold 'fpr_1pct'" in done.output
    assert "--model" in done.output
    done = guard("explain", path, "--score", "injection=0.99", "--model", "smollm2-135m")
    assert "decision: block, by rule injection: injection 0.99 >= " in done.output
    assert guard("explain", path, "--model", "no-such-model").exit_code == 2


def test_the_schema_is_printed_for_editors() -> None:
    assert json.loads(guard("schema", "selection").output)["title"] == "mia-guard policy selection"


TRUTHS = {
    "at_least": ("at_least: 0.9", "at_least: true"),
    "below": ("at_least: 0.9", "below: true"),
    "timeout_s": ("on_timeout: block", "timeout_s: true"),
    "severity": ("on_timeout: block", "severity: true"),
    "attempts": ("on_timeout: block", "attempts: true"),
    "prompt_timeout_s": ("name: p\n", "name: p\nprompt_timeout_s: true\n"),
    "window_tokens": ("name: p\n", "name: p\nwindow_tokens: true\n"),
    "version": ("version: 1", "version: true"),
}


@pytest.mark.parametrize("field", list(TRUTHS))
def test_true_is_no_number_in_any_field(policy: Path, field: str) -> None:
    policy.write_text(POLICY.replace(*TRUTHS[field], 1))
    done = guard("lint", policy)
    assert done.exit_code == 1
    assert f"{field}: must not be true" in done.output


def test_the_ids_in_the_helps_examples_are_whole_and_a_part_of_one_is_told(policy: Path, ledger: Path) -> None:
    for text in (help_texts.EXPLAIN_END, help_texts.SHOW_END):
        (found,) = re.findall(r"[0-9a-f]{8,}", text)
        assert len(found) == len(RequestRecord("/v1/chat/completions", "p", "h").request_id) == 32
    done = guard("explain", policy, "--ledger", ledger, "--request", "d96015ec0a4b")
    assert done.exit_code == 2
    assert "has no request 'd96015ec0a4b'; ids are given whole: 32 digits" in " ".join(done.output.split())
