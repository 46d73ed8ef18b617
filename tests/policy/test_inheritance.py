"""A policy may begin as another one; what it writes itself wins, and mistakes are found in the file that made them."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.policy import LoadedPolicy, PolicyError, load_policy

BASE = """\
version: 1
name: base
description: The base.
prompt_timeout_s: 5
detectors:
  injection: {kind: probe, config: mine.json}
  focus: {kind: attention_tracker, spans: {data: [user.last]}}
rules:
  - name: stop
    when: {detector: injection, at_least: 0.9}
    action: block
    on_error: allow
    message: No.
  - name: look
    when: {detector: focus, at_least: 0.5}
    action: flag
"""


def child(tmp_path: Path, text: str, base: str = BASE) -> LoadedPolicy:
    (tmp_path / "bases").mkdir(exist_ok=True)
    (tmp_path / "bases" / "base.yaml").write_text(base)
    (tmp_path / "child.yaml").write_text("version: 1\nname: child\nextends: bases/base.yaml\n" + text)
    return load_policy(tmp_path / "child.yaml")


def test_what_is_not_written_again_is_the_bases_but_name_and_description(tmp_path: Path) -> None:
    policy = child(tmp_path, "").policy
    base = load_policy(tmp_path / "bases" / "base.yaml").policy
    assert policy == base.model_copy(update={"name": "child", "description": ""})


def test_rules_and_detectors_of_the_same_name_are_changed_field_by_field_and_new_ones_come_last(tmp_path: Path) -> None:
    policy = child(
        tmp_path,
        """\
detectors:
  focus: {spans: {data: tool}}
  other: {kind: probe}
rules:
  - {name: new, when: {detector: other, below: 0.1}, action: flag}
  - {name: stop, on_error: block}
""",
    ).policy
    assert [rule.name for rule in policy.rules] == ["stop", "look", "new"]
    assert (policy.rules[0].on_error, policy.rules[0].message, policy.rules[0].action) == ("block", "No.", "block")
    assert policy.detectors["focus"].kind == "attention_tracker"
    assert policy.detectors["focus"].spans == {"data": ("tool",)}
    assert list(policy.detectors) == ["injection", "focus", "other"]


def test_rules_and_detectors_can_be_removed(tmp_path: Path) -> None:
    policy = child(tmp_path, "remove: {rules: [look], detectors: [focus]}\n").policy
    assert ([rule.name for rule in policy.rules], list(policy.detectors)) == (["stop"], ["injection"])


def test_a_policy_has_the_hash_of_what_it_says_however_it_came_to_say_it(tmp_path: Path) -> None:
    inherited = child(tmp_path, "rules: [{name: stop, message: Never.}]\n")
    written = BASE.replace("name: base\ndescription: The base.", "name: child").replace("No.", "Never.")
    (tmp_path / "whole.yaml").write_text(written)
    assert load_policy(tmp_path / "whole.yaml").hash == inherited.hash


def test_a_calibration_is_looked_for_beside_the_file_that_names_it(tmp_path: Path) -> None:
    loaded = child(tmp_path, "detectors: {other: {kind: probe, config: mine.json}}\n")
    assert loaded.file_of(("detectors", "injection", "config")).parent == tmp_path / "bases"
    assert loaded.file_of(("detectors", "other", "config")).parent == tmp_path
    assert [file.name for file in loaded.files] == ["child.yaml", "base.yaml"]


@pytest.mark.parametrize(
    ("text", "base", "message"),
    [
        ("rules: [{name: stop, action: blok}]\n", BASE, "child.yaml:4: rules.0.action"),
        ("rules: [{name: look, on_error: block}]\n", BASE.replace("flag", "flog"), "base.yaml:16: rules.1.action"),
        ("remove: {rules: [stopp]}\n", BASE, "child.yaml:4: remove.rules: "),
        ("remove: {rule: [stop]}\n", BASE, "child.yaml:4: remove.rule: "),
        ("", BASE.replace("version: 1", "version: 1\nextends: ../child.yaml"), "base.yaml:2: extends: ../child.yaml"),
        ("", BASE.replace("version: 1", "version: 1\nextends: none.yaml"), "none.yaml: cannot be read"),
        ("extends: x.yaml\n", BASE, "child.yaml:4: 'extends' is written twice"),
    ],
)
def test_a_mistake_is_reported_in_the_file_where_it_is(tmp_path: Path, text: str, base: str, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        child(tmp_path, text, base)
    assert message in str(caught.value)


def test_there_is_nothing_to_remove_without_a_base(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("version: 1\nname: p\nremove: {rules: [x]}\n")
    with pytest.raises(PolicyError, match=r"p\.yaml:3: remove: there is nothing to remove from without extends"):
        load_policy(tmp_path / "p.yaml")


def test_a_chain_has_an_end(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i}.yaml").write_text(f"version: 1\nname: p{i}\nextends: {i + 1}.yaml\n")
    with pytest.raises(PolicyError, match="more than 8 files extend each other"):
        load_policy(tmp_path / "0.yaml")


def test_a_shipped_policy_can_be_extended_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("version: 1\nname: mine\nextends: shipped:default\nmode: shadow\n")
    loaded = load_policy(tmp_path / "mine.yaml")
    assert (loaded.policy.mode, loaded.policy.rules[0].name) == ("shadow", "injection")
