"""No command takes a number that is none: what would be found, or pass, with it says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from click.testing import Result
from typer.testing import CliRunner

from guard.cli import app
from tests.policy.test_replay import POLICY

NONE = ("nan", "inf", "-inf", "-nan", "1e999", "", " ", "x")
Option = tuple[tuple[str, ...], str]


def options(group: Any, kind: type, before: tuple[str, ...] = ()) -> Iterator[Option]:
    """Command and option, of all that are a number of this kind, or several."""
    for name, command in getattr(group, "commands", {}).items():
        yield from options(command, kind, (*before, name))
    for one in () if hasattr(group, "commands") else group.params:
        if one.type_descriptor.annotation in (kind, list[kind]):  # type: ignore[valid-type]
            yield before, one.opts[0]


def known(kind: type) -> list[Option]:
    return list(options(typer.main.get_command(app), kind))


def guard(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def refused(done: Result, option: str) -> bool:
    return done.exit_code == 2 and option in done.stderr and "Traceback" not in done.stderr


def test_all_options_that_are_numbers_are_looked_at() -> None:
    assert {(("policy", "replay"), "--max-percent"), (("calibrate",), "--budget")} <= set(known(float))
    assert {(("ledger", "tail"), "--lines"), (("serve",), "--port")} <= set(known(int))


@pytest.mark.parametrize(
    ("command", "option"), known(float), ids=lambda one: one if isinstance(one, str) else " ".join(one)
)
def test_an_option_with_a_fraction_is_finite(command: tuple[str, ...], option: str) -> None:
    for value in NONE:
        assert refused(guard(*command, option, value), option), value


@pytest.mark.parametrize(
    ("command", "option"), known(int), ids=lambda one: one if isinstance(one, str) else " ".join(one)
)
def test_a_whole_number_is_one(command: tuple[str, ...], option: str) -> None:
    for value in ("nan", "inf", "", "1.5"):
        assert refused(guard(*command, option, value), option), value


@pytest.mark.parametrize("value", [*NONE, "0.5,nan", "0"])
def test_coefficients_of_a_sweep_are_finite(tmp_path: Path, value: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    given = ("--prompts", tmp_path / "prompts.jsonl", "--measure", "language:fr")
    done = guard("steer", "sweep", "x", *given, "--coefficients", value)
    assert (done.exit_code, "coefficient" in done.stderr) == (1, True), done.output


@pytest.mark.parametrize("value", [*(f"a={one}" for one in NONE), "a", "", "=0.5"])
def test_scores_that_are_given_or_asked_for_are_finite_and_of_somebody(tmp_path: Path, value: str) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    done = guard("ledger", "query", "--ledger", tmp_path / "ledger.jsonl", "--score", value)
    assert refused(done, "--score"), done.output
    (tmp_path / "p.yaml").write_text(POLICY)
    done = guard("policy", "explain", tmp_path / "p.yaml", "--score", value)
    assert done.exit_code == 2
    assert "--score" in done.stderr or "no detector" in done.stderr


@pytest.mark.parametrize("command", [("tail", "-n"), ("query", "-n"), ("verify", "--since")])
def test_no_whole_number_is_too_long_for_a_ledger(tmp_path: Path, command: tuple[str, str]) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    done = guard("ledger", command[0], "--ledger", tmp_path / "ledger.jsonl", command[1], "1" * 40)
    assert done.exception is None or isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_settings_are_finite(value: str) -> None:
    done = guard("proxy", "--set", f"read_timeout_s={value}")
    assert (done.exit_code, "read_timeout_s (GUARD_READ_TIMEOUT_S): must be a finite number" in done.output) == (
        1,
        True,
    )
