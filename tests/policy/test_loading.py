"""Policy files load whole or are refused with file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.policy import PolicyError, load_policy

unhurried = settings(deadline=None, max_examples=60)
"""Other processes may take the machine from a test."""

GOOD = """\
version: 1
name: test
detectors:
  injection:
    kind: probe
rules:
  - name: stop
    when: {detector: injection, at_least: 0.9}
    action: block
    on_error: allow
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_policy_loads_with_a_hash_of_its_content_not_of_its_spelling(tmp_path: Path) -> None:
    first = load_policy(write(tmp_path, GOOD))
    assert first.policy.rules[0].name == "stop"
    respelt = (
        GOOD.replace("{detector: injection, at_least: 0.9}", "{at_least: 0.90, detector: 'injection'}") + "# note\n"
    )
    assert load_policy(write(tmp_path, respelt)).hash == first.hash
    assert load_policy(write(tmp_path, GOOD.replace("0.9}", "0.8}"))).hash != first.hash


GATED = "{vector: v, layer: 1, coefficient: 1, phase: decode, gate: {readout: r, above: 1}}"


@pytest.mark.parametrize(
    ("old", "new", "line", "field"),
    [
        ("kind: probe", "kint: probe", 5, "detectors.injection.kint"),
        ("at_least: 0.9", "at_leest: 0.9", 8, "rules.0.when.at_leest"),
        ("{detector: injection, at_least: 0.9}", "{detector: injection}", 8, "rules.0.when"),
        ("{detector: injection, at_least: 0.9}", "{detector: injecton, at_least: 0.9}", 1, "injecton"),
        ("{detector: injection, at_least: 0.9}", "probe > 0.9", 8, "rules.0.when"),
        ("{detector: injection, at_least: 0.9}", "{any: []}", 8, "rules.0.when.any"),
        ("at_least: 0.9", "at_least: .nan", 8, "rules.0.when"),
        ("action: block", "action: blok", 9, "rules.0.action"),
        ("action: block", "action: steer", 7, "rules.0"),
        ("action: block", f"action: steer\n    steer: [{GATED}]", 7, "rules.0"),
        ("on_error: allow", "on_error: ignore", 10, "rules.0.on_error"),
        ("version: 1", "version: 2", 1, "version"),
        ("name: test", "name: 'a b'", 2, "name"),
        ("    action: block\n", "    action: block\n    action: flag\n", 10, "'action' is written twice"),
        ("kind: probe", "kind: probe\n    spans: {data: 'User says'}", 6, "detectors.injection.spans"),
        ("kind: probe", "kind: [probe", 6, "not YAML"),
        ("kind: probe", "kind: !!python/object/apply:os.system ['true']", 5, "not YAML"),
    ],
)
def test_a_mistake_is_reported_at_its_line_and_field(tmp_path: Path, old: str, new: str, line: int, field: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert [
        error for error in str(caught.value).splitlines() if error.startswith(f"{path}:{line}: ") and field in error
    ]


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    bad = GOOD.replace("kind: probe", "kint: probe").replace("action: block", "action: blok")
    with pytest.raises(PolicyError) as caught:
        load_policy(write(tmp_path, bad))
    assert len(str(caught.value).splitlines()) == 3


def test_two_rules_with_one_name_are_refused(tmp_path: Path) -> None:
    rule = GOOD[GOOD.index("  - name: stop") :]
    with pytest.raises(PolicyError, match="share a name: stop"):
        load_policy(write(tmp_path, GOOD + rule))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nowhere\.yaml: cannot be read"):
        load_policy(tmp_path / "nowhere.yaml")


@unhurried
@given(st.binary(max_size=400) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_any_bytes_load_or_raise_a_policy_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(raw)
    with pytest.raises(PolicyError, match=r"any\.yaml"):
        load_policy(path)


def test_the_place_of_a_mistake_that_is_nested_deeply_is_told_in_short(tmp_path: Path) -> None:
    nested = "{not: " * 150 + "{detector: injection, at_leest: 0.9}" + "}" * 150
    with pytest.raises(PolicyError) as caught:
        load_policy(write(tmp_path, GOOD.replace("{detector: injection, at_least: 0.9}", nested)))
    for line in str(caught.value).splitlines():
        assert len(line.removeprefix(str(tmp_path))) < 200
        assert ": rules.0.when.not." in line
