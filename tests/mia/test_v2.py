"""The V2 adapter: the engine tests of V1 pass on the V2 runner, what it cannot read exactly is refused at start, and
vLLM still has the names that it relies on."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from guard.mia import plugin
from guard.mia.runners.v2 import refuse_unsupported
from guard.mia.taps import UnsupportedModelError

ROOT = Path(__file__).parent.parent.parent
# Soft cap and windows; normed queries and keys; transformers' own code.
ARCHITECTURES = ("gemma2", "qwen3", "olmo2")


def config(**changed: Any) -> Any:
    """A start that the adapter was written for, but for ``changed``."""
    values: dict[str, Any] = {
        "tp": 1,
        "pp": 1,
        "pcp": 1,
        "dcp": 1,
        "dbo": False,
        "speculative": None,
        "diffusion": False,
        "task": "generate",
        "sleep": False,
        "asynchronous": False,
        "compiled": CompilationMode.NONE,
        "graphs": CUDAGraphMode.NONE,
    } | changed
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tp"],
            pipeline_parallel_size=values["pp"],
            prefill_context_parallel_size=values["pcp"],
            decode_context_parallel_size=values["dcp"],
            enable_dbo=values["dbo"],
        ),
        model_config=SimpleNamespace(
            is_diffusion=values["diffusion"], runner_type=values["task"], enable_sleep_mode=values["sleep"]
        ),
        speculative_config=values["speculative"],
        scheduler_config=SimpleNamespace(async_scheduling=values["asynchronous"]),
        compilation_config=SimpleNamespace(mode=values["compiled"], cudagraph_mode=values["graphs"]),
        additional_config={"mia": {}},
    )


def test_what_the_adapter_was_written_for_is_accepted() -> None:
    refuse_unsupported(config())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tp": 2}, "tensor parallelism"),
        ({"pp": 2}, "pipeline parallelism"),
        ({"pcp": 2}, "context parallelism"),
        ({"dcp": 2}, "context parallelism"),
        ({"dbo": True}, "dual batch overlap"),
        ({"speculative": object()}, "speculative decoding"),
        ({"diffusion": True}, "diffusion language models"),
        ({"task": "pooling"}, "pooling models"),
        ({"sleep": True}, "sleep mode"),
        ({"asynchronous": True}, "--no-async-scheduling"),
        ({"graphs": CUDAGraphMode.FULL}, "--enforce-eager"),
        ({"compiled": CompilationMode.VLLM_COMPILE}, "--enforce-eager"),
    ],
)
def test_a_mode_in_which_readouts_would_be_wrong_is_refused_with_the_reason(changed: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_unsupported(config(**changed))


def test_the_refusal_comes_before_the_model_is_loaded_and_an_engine_without_taps_is_left_alone() -> None:
    plugin.register()
    runner: Any = SimpleNamespace(vllm_config=config(pp=2))
    with pytest.raises(UnsupportedModelError, match="pipeline parallelism"):
        GPUModelRunner.load_model(runner)
    runner.vllm_config.additional_config = {}
    with pytest.raises(AttributeError):  # vLLM's own method runs, and misses the rest of a real runner
        GPUModelRunner.load_model(runner)


def names(dataclass: Any) -> set[str]:
    return {field.name for field in fields(dataclass)}


def test_vllm_has_the_names_that_are_relied_on() -> None:
    wrapped = ("load_model", "finish_requests", "add_requests", "prepare_inputs", "_dummy_run", "sample_tokens")
    assert [name for name in wrapped if not callable(getattr(GPUModelRunner, name, None))] == []
    assert names(InputBatch) >= {
        "req_ids",
        "num_reqs",
        "query_start_loc_np",
        "num_computed_tokens_np",
        "num_scheduled_tokens",
        "prefill_len_np",
    }
    assert names(SchedulerOutput) >= {"scheduled_new_reqs", "finished_req_ids"}
    assert names(NewRequestData) >= {"req_id", "sampling_params"}
    assert isinstance(NewRequestData.prompt_len, property)
    assert "model_runner_output" in inspect.signature(AsyncOutput.__init__).parameters
    source = inspect.getsource(GPUModelRunner.__init__) + inspect.getsource(inspect.unwrap(GPUModelRunner.load_model))
    for name in ("max_num_reqs", "max_num_tokens", "dtype", "device", "vllm_config", "model"):
        assert f"self.{name} = " in source


@pytest.mark.parametrize(
    "selection",
    [
        ["tests/engine/v2_cases.py"],
        ["tests/engine/test_exactness.py", "-k", "eager"],
        ["tests/engine/test_steering.py"],
        ["tests/engine/test_scheduling.py", "-k", "not preempted"],
        ["tests/engine/test_idle.py", "-k", "eager"],
        [f"tests/engine/test_architectures.py::test_readouts_are_the_models_own[{name}]" for name in ARCHITECTURES],
    ],
    ids=lambda selection: Path(selection[0].partition("::")[0]).stem,
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs V2 as it is; its interpreter is for machines without")
def test_on_the_v2_runner_passes(selection: list[str]) -> None:
    """In a process of its own: which runner an engine may use is settled when vLLM is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.engine.v2_on_cpu", *selection]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
