"""What ships: every policy loads and passes its tests, and the generated reference page is the schema's."""

import re
from pathlib import Path

import pytest
import yaml

from guard.data import data_folder
from guard.policy import load_policy
from guard.policy.cases import cases_beside, run_cases
from guard.policy.lint import lint
from guard.policy.reference import reference
from guard.policy.selection import Selection

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted(data_folder("policies").glob("*.tests.yaml"))
POLICIES = sorted(set(data_folder("policies").glob("*.yaml")) - set(TESTS))


def test_the_policies_that_issue_and_pages_name_ship() -> None:
    assert {path.stem for path in POLICIES} == {"default", "strict", "observe", "rag", "agent"}


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_a_shipped_policy_loads_and_is_named_after_its_file(path: Path) -> None:
    assert load_policy(path).policy.name == path.stem


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_a_shipped_policy_passes_the_tests_beside_it_and_they_leave_no_rule_out(path: Path) -> None:
    report = run_cases(cases_beside(path))
    assert [outcome for outcome in report.outcomes if outcome.failure] == []
    assert report.untested == ()


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_a_shipped_policy_tells_editors_where_its_schema_is(path: Path) -> None:
    for file, kind in ((path, "policy"), (cases_beside(path), "tests")):
        line = file.read_text().splitlines()[0]
        assert line == f"# yaml-language-server: $schema=schema/{kind}.schema.json"


def test_lint_reports_every_file_and_fails_when_one_is_bad(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 1\nname: bad\nrulez: []\n")
    said: list[str] = []
    assert lint([*POLICIES, bad], said.append) == 1
    assert len(said) == len(POLICIES) + 1
    assert said[-1].startswith(f"{bad}:3: rulez")
    assert lint(POLICIES, said.append) == 0


def test_lint_tells_the_mistakes_of_all_files_of_a_folder_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("""version: 1
name: a
detectors:
  danger: {kind: probe, scope: {roles: 3}}
rules:
  - name: one
    when: {score: danger, at_least: [high]}
    action: blok
  - name: two
    when: {all: [{detector: danger}, {any: []}]}
    action: block
    frobnicate: 1
  - when: 3
    action: block
""")
    (tmp_path / "b.yaml").write_text("version: 1\nname: b\nrules: {}\n")
    (tmp_path / "selection.yaml").write_text("version: 1\nassignments:\n  - {name: x, policy: a, percent: much}\n")
    said: list[str] = []
    assert lint([tmp_path], said.append) == 1
    assert "\n".join(said).replace(f"{tmp_path}/", "").splitlines() == [
        "a.yaml:4: detectors.danger.scope: must be a list",
        "a.yaml:7: rules.0.when.detector: is missing",
        "a.yaml:7: rules.0.when.at_least: must be a number, or must be text",
        "a.yaml:7: rules.0.when.score: there is no such field",
        "a.yaml:8: rules.0.action: must be 'flag', 'redact', 'steer', 'retry', 'route' or 'block'",
        "a.yaml:10: rules.1.when.all.0: needs at_least, below, or both",
        "a.yaml:10: rules.1.when.all.1.any: must have at least 1 item, not 0",
        "a.yaml:12: rules.1.frobnicate: there is no such field",
        "a.yaml:13: rules.2.name: is missing",
        "a.yaml:13: rules.2.when: a condition is a mapping with detector, all, any or not",
        "b.yaml:3: rules: must be a list",
        "selection.yaml:1: default: is missing",
        "selection.yaml:3: assignments.0.percent: must be a number",
    ]


def test_with_a_model_lint_knows_its_thresholds_and_steering_vectors(tmp_path: Path) -> None:
    key, folder, said = "SmolLM2-135M-Instruct", data_folder("model_configs"), list[str]()
    assert lint(POLICIES, said.append, config_key=key, model_configs=folder) == 0, said
    text = (data_folder("policies") / "default.yaml").read_text()
    for old, new in (("at_least: fpr_5pct}", "at_least: fpr_7pct}"), ("vector: caution", "vector: courage")):
        (tmp_path / "bad.yaml").write_text(text.replace(old, new))
        assert lint([tmp_path / "bad.yaml"], said.append) == 0
        assert lint([tmp_path / "bad.yaml"], said.append, config_key=key, model_configs=folder) == 1
        assert new.removesuffix("}").split()[-1] in said[-1]


def test_the_selection_in_the_operators_page_is_one() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "assignments:" in block]
    shown = Selection.model_validate(yaml.safe_load(text))
    assert (shown.default, shown.shadow, shown.assignments[0].percent) == ("default", "candidate", 5)


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "policy-reference.md").read_text()
    assert page == reference(), "run: python -m guard.policy.reference > docs/policy-reference.md"
