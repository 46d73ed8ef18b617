"""The built wheel works from an empty folder: shipped files are in it and found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from guard.machine import free_port

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, f"--wheel-dir={folder}", str(CHECKOUT)], check=True, timeout=300)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def guard_command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``guard`` in an environment with the wheel, which borrows this environment's other packages."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "guard"


def run(guard_command: Path, folder: Path, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(guard_command), *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shipped_folders_are_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind in ("policies", "model_configs", "dashboards"):
        shipped = {f.relative_to(CHECKOUT).as_posix() for f in (CHECKOUT / kind).rglob("*") if f.is_file()}
        assert shipped
        assert {f"guard/data/{name}" for name in shipped} <= names
    static = {f.relative_to(CHECKOUT).as_posix() for f in (CHECKOUT / "guard/console/static").iterdir()}
    assert "guard/console/static/index.html" in static <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_the_doctor_and_the_model_list_work_from_an_empty_folder(guard_command: Path, tmp_path: Path) -> None:
    report = json.loads(run(guard_command, tmp_path, "doctor", "--json", "--port", str(free_port())))
    assert {"name": "plugin", "level": "ok", "found": "vLLM loads 'mia'", "remedy": ""} in report["checks"]
    assert "smollm2-135m" in run(guard_command, tmp_path, "model", "list")


def test_the_proxy_starts_from_an_empty_folder_with_the_shipped_policy(guard_command: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [str(guard_command), "proxy", "--upstream", f"http://127.0.0.1:{free_port()}", "--port", str(port)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert answers(f"http://127.0.0.1:{port}/livez", process)
    finally:
        process.terminate()
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 0, said


def answers(url: str, process: subprocess.Popen[str]) -> bool:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - a loopback address
                return bool(answer.status == 200)
        except OSError:
            time.sleep(0.2)
    return False
