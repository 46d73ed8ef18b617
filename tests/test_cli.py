"""The command ``guard`` as a user calls it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import guard
from guard.cli import app


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "guard", *arguments]
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("serve", "proxy", "demo", "doctor", "keys", "model", "policy", "data", "steer", "calibrate"):
        assert f" {command} " in done.stdout
    assert " eval " in done.stdout


HEAVY = {
    "torch",
    "vllm",
    "transformers",
    "sklearn",
    "scipy",
    "numpy",
    "fastapi",
    "pydantic",
    "yaml",
    "httpx",
    "prometheus_client",
}


def test_help_appears_at_once_because_nothing_heavy_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "guard", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert {"guard", "typer"} <= imported
    assert not HEAVY & imported


def test_importing_the_guard_and_its_command_loads_neither_torch_nor_vllm() -> None:
    program = "import guard, guard.cli, sys; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_is_the_packages() -> None:
    assert run("--version").stdout == f"guard {guard.__version__}\n"


def test_models_are_listed_with_licence_and_whether_they_are_here(tmp_path: Path) -> None:
    (line,) = run("model", "list", XDG_CACHE_HOME=str(tmp_path)).stdout.splitlines()
    assert line.split()[:3] == ["smollm2-135m", "SmolLM2-135M-Instruct", "Apache-2.0"]
    assert "not pulled (92 MB)" in line


def test_pulling_an_unknown_model_fails_with_the_known_names_and_no_traceback() -> None:
    done = run("model", "pull", "gpt-9")
    assert done.returncode == 1
    assert done.stderr == "guard: no model is called 'gpt-9'; known: smollm2-135m\n"


def test_the_doctors_json_is_json_and_its_exit_code_agrees() -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    assert {check["level"] for check in report["checks"]} <= {"ok", "warn", "fail"}


def test_the_doctor_measures_the_taps_of_the_policy_and_model_it_is_given(tmp_path: Path) -> None:
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10**9}
    folder = tmp_path / "SmolLM2-135M-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    policy = str(Path(__file__).parent.parent / "policies" / "default.yaml")
    done = run("doctor", "--json", "--model", str(folder), "--policy", policy)
    taps = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == "taps")
    assert (done.returncode, taps["level"]) == (1, "fail")
    assert "tap heads in fewer layers" in taps["remedy"]


def test_a_failed_check_is_shown_with_its_remedy_and_exit_code_1() -> None:
    done = run("doctor", VLLM_PLUGINS="none")
    assert done.returncode == 1
    assert "unset VLLM_PLUGINS" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [("serve", "--model", "no-such-model"), ("proxy", "--upstream", "http://x", "--model", "no-such-model")],
)
def test_a_model_that_does_not_exist_is_refused_before_anything_starts(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert "owner/model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["serve", "proxy"])
def test_help_of_what_runs_says_where_settings_come_from_how_it_stops_and_what_it_exits_with(command: str) -> None:
    told = " ".join(run(command, "--help").stdout.split())
    assert "in this order: option, environment variable, file of --config, default" in told
    assert "SIGTERM and Ctrl-C stop it" in told
    assert "Exit status: 0 after a signal" in told
    assert f"guard {command} --" in told
    for option in ("--config", "--set", "--keys", "--admin-port", "--tls-cert", "--redis-url"):
        assert option in told


def _commands(group: typer.Typer, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    names = [(*before, str(one.name or one.callback.__name__)) for one in group.registered_commands if one.callback]
    for one in group.registered_groups:
        assert one.typer_instance is not None
        names += _commands(one.typer_instance, (*before, str(one.name)))
    return names


@pytest.mark.parametrize("command", _commands(app), ids=" ".join)
def test_help_of_every_command_is_a_page_that_says_how_it_ends_and_shows_it(command: tuple[str, ...]) -> None:
    told = " ".join(CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).output.split())
    assert "Exit status: 0" in told
    assert "Examples:" in told
    assert f"guard {' '.join(command)}" in told.partition("Examples:")[2]
