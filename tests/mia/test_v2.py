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
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

ROOT = Path(__file__).parent.parent.parent
# Soft cap and windows. What else an architecture has does not concern the runner.
ARCHITECTURES = ("gemma2",)
ALL = "MIA_ALL_RUNNERS"
"""Set, everything is run; else what says most. On a GPU ``make gpu`` runs it all, and in a tenth of the time."""
LONG = [
    ["tests/engine/test_idle.py", "-k", "not compiled"],
    # Of the three that share long prompts one: vLLM's kernels take the interpreter 40 s for each.
    ["tests/engine/test_steering.py", "-k", "not prefill-203 and not both-202"],
    # Triton's interpreter does not run vLLM's kernel for structured output.
    ["tests/engine/test_scheduling.py", "-k", "not preempted and not structured"],
    [f"tests/engine/test_architectures.py::test_readouts_are_the_models_own[{name}]" for name in ARCHITECTURES],
]


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
    assert callable(AsyncOutput.get_output)
    source = inspect.getsource(GPUModelRunner.__init__) + inspect.getsource(inspect.unwrap(GPUModelRunner.load_model))
    for name in ("max_num_reqs", "max_num_tokens", "dtype", "device", "vllm_config", "model"):
        assert f"self.{name} = " in source


@pytest.mark.parametrize(
    "selection",
    [
        ["tests/engine/v2_cases.py"],
        ["tests/engine/test_exactness.py", "-k", "eager"],
        ["tests/engine/test_idle_calls.py"],
        *(LONG if os.environ.get(ALL) else []),
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
