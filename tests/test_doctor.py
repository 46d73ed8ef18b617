"""The doctor's judgements on facts given to it, and its report on the machine that runs the tests."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from guard.doctor import (
    GIB,
    Check,
    check_gpu,
    check_logits_processors,
    check_memory,
    check_model,
    check_plugin,
    check_port,
    check_processor,
    check_python,
    check_system,
    check_taps,
    check_torch_companions,
    check_vllm,
    check_writable,
    examine,
    has_failed,
    judge_taps,
    model_description,
    report,
    vllm_step_limits,
)
from guard.machine import Gpu, free_port
from guard.mia.engine_config import EngineConfig
from guard.mia.sizing import Sizing, StepLimits
from guard.models import DEFAULT_MODEL, ResolvedModel

H200 = Gpu("NVIDIA H200", "580.95", 143771)
CHECKOUT = Path(__file__).parent.parent


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


LLAMA = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}


def levels(checks: list[Check]) -> dict[str, str]:
    assert all(bool(check.remedy) == (check.level != "ok") for check in checks)
    return {check.name: check.level for check in checks}


def judged(device_bytes: int = 140 * GIB, memory_bytes: int = 64 * GIB, **config: Any) -> list[Check]:
    """Taps at two layers of an 8B model, on a GPU."""
    sizing = Sizing(EngineConfig(hidden_layers=(1, 2), **config), StepLimits(1024, 8192), 4096, 2, {}, False)
    return judge_taps(sizing, device_bytes, memory_bytes)


def test_the_model_that_is_asked_for_is_the_one_that_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "own").mkdir()
    for asked, level in (
        (DEFAULT_MODEL, "warn"),
        ("nosuch/none", "warn"),
        (str(tmp_path / "own"), "fail"),
        (str(tmp_path / "nosuch"), "fail"),
    ):
        check = check_model(asked)
        assert (check.level, asked in check.found) == (level, True)
        assert check.remedy
    (tmp_path / "own" / "config.json").write_text(json.dumps({"hidden_size": 64}))
    assert check_model(str(tmp_path / "own")).level == "ok"


def test_taps_that_do_not_fit_fail_and_name_the_setting() -> None:
    assert set(levels(judged()).values()) == {"ok"}
    too_many_rows = judged(max_hidden_rows_per_step=10**8)
    assert levels(too_many_rows)["taps"] == "fail"
    assert "max_hidden_rows_per_step" in too_many_rows[0].remedy
    assert levels(judged(device_bytes=0, max_hidden_rows_per_step=10**8))["taps"] == "ok", "nobody knows"
    no_host_memory = judged(memory_bytes=GIB, max_host_bytes=GIB)
    assert levels(no_host_memory)["taps, host"] == "fail"
    assert "max_host_bytes" in no_host_memory[-1].remedy
    small_ring = judged(max_shared_bytes=2**20)
    assert levels(small_ring)["taps, host"] == "warn"
    assert "max_shared_bytes" in small_ring[-1].remedy


def described(folder: Path, **config: Any) -> dict[str, Any] | None:
    (folder / "config.json").write_text(json.dumps(config))
    return model_description(ResolvedModel(str(folder), "m", "m"))


def test_sizes_of_a_model_come_from_its_own_file(tmp_path: Path) -> None:
    assert model_description(ResolvedModel(str(tmp_path), "m", "m")) is None
    assert described(tmp_path, **LLAMA) == LLAMA
    assert described(tmp_path, text_config=LLAMA, hidden_size=1) == LLAMA
    gpt2 = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}
    assert described(tmp_path, n_embd=768, n_head=12) == gpt2
    assert described(tmp_path, d_model=8) is None


def test_a_policys_taps_are_measured_on_the_model_it_is_for(tmp_path: Path) -> None:
    with patch("guard.doctor.model_description", return_value=LLAMA):
        on_gpu, *_ = check_taps(DEFAULT_MODEL, CHECKOUT / "policies" / "default.yaml", "cuda", [H200], 64 * GIB)
        on_cpu, *_ = check_taps(DEFAULT_MODEL, CHECKOUT / "policies" / "default.yaml", "cpu", [], 64 * GIB)
    assert (on_gpu.level, on_cpu.level) == ("ok", "ok")
    assert "at 1024 requests and 8192 tokens a step" in on_gpu.found
    probe = json.loads((CHECKOUT / "model_configs" / "probe" / "SmolLM2-135M-Instruct.json").read_text())
    hidden_mib = float(on_gpu.found.partition("hidden-state taps ")[2].partition(" MiB")[0])
    assert hidden_mib / len(probe["params"]["layers"]) == pytest.approx(1.13, rel=0.02)
    assert "at 128 requests and 2048 tokens a step" in on_cpu.found
    with patch("guard.doctor.model_description", return_value=None):
        assert levels(check_taps(DEFAULT_MODEL, CHECKOUT / "policies" / "default.yaml", "cpu", [], 1)) == {
            "taps": "warn"
        }
    broken = tmp_path / "policy.yaml"
    broken.write_text("version: 1\nname: x\nrules: nothing\n")
    assert levels(check_taps(DEFAULT_MODEL, broken, "cpu", [], 1)) == {"taps": "fail"}


@pytest.mark.parametrize(
    "gpu", [None, H200, Gpu("NVIDIA A100", "1", 81920), Gpu("B200", "1", 183359), Gpu("T4", "1", 15360)]
)
def test_what_a_step_holds_is_what_vllm_takes_by_default(gpu: Gpu | None) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    platform = SimpleNamespace(
        get_device_total_memory=lambda: gpu.memory_mib * 2**20 if gpu else 0,
        get_device_name=lambda: gpu.name if gpu else "cpu",
        is_tpu=lambda: False,
        is_cpu=lambda: gpu is None,
    )
    with patch("vllm.engine.arg_utils.current_platform", platform):
        tokens, requests = EngineArgs.get_batch_defaults(world_size=1)
    server = UsageContext.OPENAI_API_SERVER
    assert vllm_step_limits(gpu) == StepLimits(requests[server], tokens[server])


def test_the_environment_that_runs_the_tests_is_fit_to_run_the_product() -> None:
    checks = examine("127.0.0.1", free_port(), free_port())
    assert [check for check in checks if check.level == "fail"] == []
    assert len({check.name for check in checks}) == len(checks)
