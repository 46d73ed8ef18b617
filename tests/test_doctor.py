"""The doctor's judgements on facts given to it, and its report on the machine that runs the tests."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from guard.doctor import (
    GIB,
    Check,
    check_gpu,
    check_logits_processors,
    check_memory,
    check_plugin,
    check_port,
    check_processor,
    check_python,
    check_system,
    check_torch_companions,
    check_vllm,
    check_writable,
    examine,
    has_failed,
    report,
)
from guard.machine import Gpu, free_port

H200 = Gpu("NVIDIA H200", "580.95", 143771)


@pytest.mark.parametrize(
    ("check", "level"),
    [
        (check_python((3, 10)), "fail"),
        (check_python((3, 11)), "ok"),
        (check_system("Darwin", "25"), "warn"),
        (check_system("Linux", "6.1"), "ok"),
        (check_processor(frozenset({"sse4_2"}), "x86_64", "cpu"), "fail"),
        (check_processor(frozenset({"sse4_2"}), "x86_64", "cuda"), "ok"),
        (check_processor(frozenset({"avx2"}), "x86_64", "cpu"), "ok"),
        (check_processor(frozenset({"asimd"}), "aarch64", "cpu"), "ok"),
        (check_memory(4 * GIB, "cpu"), "fail"),
        (check_memory(7 * GIB, "cpu"), "warn"),
        (check_memory(6 * GIB, "cuda"), "ok"),
        (check_memory(16 * GIB, "cpu"), "ok"),
        (check_gpu([], "cpu"), "ok"),
        (check_gpu([], "cuda"), "fail"),
        (check_gpu([H200], "cuda"), "ok"),
        (check_gpu([H200], "cpu"), "warn"),
        (check_vllm(None, None), "fail"),
        (check_vllm("0.29.0", "0.29.0"), "fail"),
        (check_vllm("0.28.1", None), "fail"),
        (check_vllm("0.29.3", None), "ok"),
        (check_vllm(None, "0.29.0"), "ok"),
        (check_plugin([], None), "fail"),
        (check_plugin([("mia", "mia-guard")], None), "ok"),
        (check_plugin([("mia", "mia-guard")], "lora"), "fail"),
        (check_plugin([("mia", "mia-guard")], "lora,mia"), "ok"),
        (check_logits_processors([("noise", "some-package")]), "warn"),
        (check_logits_processors([]), "ok"),
    ],
)
def test_each_fact_is_judged_and_whatever_is_not_ok_has_a_remedy(check: Check, level: str) -> None:
    assert check.level == level
    assert bool(check.remedy) == (level != "ok")


def test_a_torch_companion_that_cannot_be_imported_is_a_failure_of_the_cpu_build_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("guard.machine.module_installed", lambda name: name == "torchvision")
    broken = check_torch_companions("cpu", lambda _: False)
    assert broken.level == "fail"
    assert "pip uninstall --yes torchvision" in broken.remedy
    assert check_torch_companions("cpu", lambda _: True).level == "ok"
    assert check_torch_companions("cuda", lambda _: False).level == "ok"


def test_a_taken_port_names_the_option_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check = check_port("port", "127.0.0.1", server.getsockname()[1], "--port")
    assert check.level == "warn"
    assert "--port" in check.remedy
    assert check_port("port", "127.0.0.1", free_port(), "--port").level == "ok"


def test_a_cache_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = check_writable("cache", tmp_path / "file" / "cache")
    assert check.level == "fail"
    assert "XDG_CACHE_HOME" in check.remedy


def test_the_report_is_not_ok_exactly_when_a_check_failed() -> None:
    good, odd, bad = Check("a", "ok", ""), Check("b", "warn", "", "x"), Check("c", "fail", "", "x")
    assert not has_failed([good, odd])
    assert report([good, odd]) == {
        "ok": True,
        "checks": [
            {"name": "a", "level": "ok", "found": "", "remedy": ""},
            {"name": "b", "level": "warn", "found": "", "remedy": "x"},
        ],
    }
    assert report([bad])["ok"] is False


def test_the_environment_that_runs_the_tests_is_fit_to_run_the_product() -> None:
    checks = examine("127.0.0.1", free_port(), free_port())
    assert [check for check in checks if check.level == "fail"] == []
    assert len({check.name for check in checks}) == len(checks)
