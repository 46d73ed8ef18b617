"""The commands ``guard keys``, as an operator calls them."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from guard.cli import app

runner = CliRunner()


def keys(*arguments: str) -> tuple[int, str, str]:
    done = runner.invoke(app, ["keys", *arguments])
    return done.exit_code, done.stdout, done.stderr


def created(file: Path, *arguments: str) -> tuple[str, str]:
    """The key and its id."""
    code, out, err = keys("create", "--file", str(file), *arguments)
    assert code == 0, err
    (key_id,) = re.findall(r"key (\w+) is in", err)
    return out.strip(), key_id


def test_a_key_is_shown_once_and_the_file_has_its_hash_alone_readable_by_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secret, key_id = created(file, "--name", "CI", "--tenant", "acme", "--requests-per-s", "2.5", "--concurrent", "3")
    assert re.fullmatch(r"mg_[A-Za-z0-9_\-]{43}", secret)
    assert secret not in file.read_text()
    (entry,) = yaml.safe_load(file.read_text())["keys"]
    assert entry["sha256"] == hashlib.sha256(secret.encode()).hexdigest()
    assert (entry["id"], entry["tenant"], entry["limits"]) == (key_id, "acme", {"requests_per_s": 2.5, "concurrent": 3})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_differ_and_are_listed_without_hashes_until_they_are_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    (one, one_id), (two, two_id) = created(file), created(file, "--admin", "--name", "the operator")
    assert one != two
    code, out, _ = keys("list", "--file", str(file), "--json")
    assert code == 0
    assert [(key["id"], key["admin"]) for key in json.loads(out)] == [(one_id, False), (two_id, True)]
    assert hashlib.sha256(one.encode()).hexdigest() not in out
    assert keys("revoke", "--file", str(file), one_id)[1].startswith(f"revoked {one_id}")
    lines = keys("list", "--file", str(file))[1].splitlines()
    assert [line.split()[:2] for line in lines] == [[two_id, "admin"]]


def test_tenants_that_people_wrote_stay_when_a_key_is_made(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("version: 1\ntenants:\n  acme: {limits: {tokens_per_min: 1000}}\n")
    file.chmod(0o640)
    created(file, "--tenant", "acme")
    assert yaml.safe_load(file.read_text())["tenants"] == {"acme": {"limits": {"tokens_per_min": 1000}}}
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, ("revoke", "abcd1234"), "cannot be read"),
        ("version: 1\n", ("revoke", "abcd1234"), "no key has the id 'abcd1234'"),
        ("version: 1\nkays: []\n", ("create",), "keys.yaml:2: kays"),
        ("version: 1\n", ("create", "--requests-per-s", "-1"), "requests_per_s"),
        ("version: 1\n", ("create", "--tenant", "a b"), "tenant"),
        ("version: 1\n", ("create", "--admin", "--tenant", "acme"), "an admin key has no tenant"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_and_changes_nothing(
    tmp_path: Path, text: str | None, arguments: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "keys.yaml"
    if text is not None:
        file.write_text(text)
    code, out, err = keys(arguments[0], "--file", str(file), *arguments[1:])
    assert (code, out) == (1, "")
    assert err.startswith("guard: ")
    assert message in err
    assert (file.read_text() if file.exists() else None) == text


def test_keys_whose_policy_no_key_may_have_are_told_by_list_and_lint(tmp_path: Path) -> None:
    file, policies = tmp_path / "keys.yaml", tmp_path / "policies"
    policies.mkdir()
    for name in ("one", "strict"):
        (policies / f"{name}.yaml").write_text(f"{{version: 1, name: {name}}}")
    (policies / "selection.yaml").write_text("{version: 1, default: one}")
    (_, fine), (_, lost) = created(file, "--policy", "one"), created(file, "--policy", "strict")
    said = f"key {lost}: each of its requests is a 503: it has the policy strict, and keys may have one ("
    code, out, err = keys("list", "--file", str(file), "--policy", str(policies))
    assert (code, len(out.splitlines())) == (0, 2)
    assert said in err
    assert fine not in err
    linted = runner.invoke(app, ["policy", "lint", str(policies), "--keys", str(file)])
    assert linted.exit_code == 0
    assert f"{policies}: note: {said}" in linted.stdout
    # A single policy is everybody's.
    assert said in keys("list", "--file", str(file), "--policy", str(policies / "one.yaml"))[2]
    (policies / "selection.yaml").write_text("{version: 1, default: one, for_keys: [strict]}")
    assert keys("list", "--file", str(file), "--policy", str(policies))[2] == ""
    assert "note" not in runner.invoke(app, ["policy", "lint", str(policies), "--keys", str(file)]).stdout
    broken = keys("list", "--file", str(file), "--policy", str(tmp_path / "nothing.yaml"))
    assert broken[0] == 1
    assert "nothing.yaml" in broken[2]
