"""The script behind ``make install``: what it decides, without installing anything."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_python_that_is_too_old_is_refused_with_the_way_out(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    with pytest.raises(SystemExit, match="1"):
        bootstrap.check_python()
    assert "make PYTHON=" in capsys.readouterr().err


def test_an_index_that_does_not_answer_costs_seconds_and_is_left_out(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "TORCH_CPU_INDEX", "http://192.0.2.1/whl/cpu")  # reserved: answers nobody
    started_s = time.monotonic()
    assert bootstrap.index_arguments("cpu") == []
    assert time.monotonic() - started_s < bootstrap.PROBE_TIMEOUT_S + 3


def test_an_index_that_answers_is_used_for_the_cpu_build_only(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split(" port ")[1].split()[0]
        monkeypatch.setattr(bootstrap, "TORCH_CPU_INDEX", f"http://127.0.0.1:{port}")
        assert bootstrap.index_arguments("cpu") == ["--extra-index-url", f"http://127.0.0.1:{port}"]
        assert bootstrap.index_arguments("cuda") == []
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("script", "found"),
    [("echo 'GPU 0: NVIDIA H200'", True), ("echo 'No devices were found'", False), ("echo GPU; exit 9", False)],
)
def test_a_gpu_is_one_that_the_driver_lists(
    script: str, found: bool, bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert bootstrap.has_gpu() is found


def test_another_pyproject_or_extra_means_installing_again(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text("a")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    first = bootstrap.fingerprint("cpu")
    assert bootstrap.fingerprint("cpu") == first
    assert bootstrap.fingerprint("cuda") != first
    (tmp_path / "pyproject.toml").write_text("b")
    assert bootstrap.fingerprint("cpu") != first
