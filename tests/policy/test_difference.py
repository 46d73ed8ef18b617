"""Two policies differ in what they say, not in how they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.policy import load_policy
from guard.policy.difference import differences
from guard.policy.schema import Policy
from tests.policy.test_loading import GOOD

TWO = GOOD + "  - {name: look, when: {detector: injection, at_least: 0.5}, action: flag}\n"


def policy(tmp_path: Path, text: str) -> Policy:
    (tmp_path / "p.yaml").write_text(text)
    return load_policy(tmp_path / "p.yaml").policy


@pytest.mark.parametrize(
    ("after", "lines"),
    [
        (TWO.replace("    action: block\n", "    severity: 95\n    action: block\n    mode: enforce\n"), []),
        (TWO.replace("0.9", "fpr_1pct"), ['~ rules.stop.when.at_least: 0.9 -> "fpr_1pct"']),
        (TWO.replace("name: test", "name: test\nmode: shadow"), ['~ mode: "enforce" -> "shadow"']),
        (TWO.replace("block", "flag").replace("flag\n    on", "flag\n    severity: 9\n    on"),
         ['~ rules.stop.action: "block" -> "flag"', "~ rules.stop.severity: 95 -> 9"]),
        (TWO.replace("kind: probe", "kind: probe\n  b: {kind: probe}"),
         ['+ detectors.b: {"kind": "probe"}']),
    ],
)  # fmt: skip
def test_every_difference_is_named_by_rule_and_field(tmp_path: Path, after: str, lines: list[str]) -> None:
    assert differences(policy(tmp_path, TWO), policy(tmp_path, after)) == lines


def test_a_rule_that_is_gone_is_named_and_so_is_another_order(tmp_path: Path) -> None:
    (line,) = differences(policy(tmp_path, TWO), policy(tmp_path, GOOD))
    assert line.startswith('- rules.look: {"name": "look"')
    rules = TWO.index("  - {name: look")
    swapped = TWO[: TWO.index("  - name: stop")] + TWO[rules:] + TWO[TWO.index("  - name: stop") : rules]
    assert differences(policy(tmp_path, TWO), policy(tmp_path, swapped)) == ["~ rules: order stop, look -> look, stop"]
