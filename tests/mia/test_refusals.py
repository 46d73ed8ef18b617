"""Modes in which readouts would be wrong are refused at start with the reason, on either runner."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

from guard.mia import plugin
from guard.mia.runners import v1, v2
from guard.mia.taps import UnsupportedModelError


def config(**changed: Any) -> Any:
    """A start that the adapters were written for, but for ``changed``."""
    values: dict[str, Any] = {
        "tp": 1,
        "pp": 1,
        "pcp": 1,
        "dcp": 1,
        "sp": False,
        "dbo": False,
        "speculative": None,
        "diffusion": False,
        "task": "generate",
        "sleep": False,
        "asynchronous": False,
        "device": "cuda",
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
        compilation_config=SimpleNamespace(
            mode=values["compiled"],
            cudagraph_mode=values["graphs"],
            pass_config=SimpleNamespace(enable_sp=values["sp"]),
        ),
        device_config=SimpleNamespace(device_type=values["device"]),
        additional_config={"mia": {}},
    )


COMMON = [
    ({"pp": 2}, "pipeline parallelism"),
    ({"pcp": 2}, "context parallelism"),
    ({"dcp": 2}, "context parallelism"),
    ({"sp": True}, "sequence parallelism"),
    ({"dbo": True}, "dual batch overlap"),
    ({"speculative": object()}, "speculative decoding"),
    ({"diffusion": True}, "diffusion language models"),
    ({"task": "pooling"}, "pooling models"),
    ({"sleep": True}, "sleep mode"),
]
ONLY_V1 = [
    ({"asynchronous": True}, "--no-async-scheduling"),
    ({"graphs": CUDAGraphMode.FULL}, "--enforce-eager"),
    ({"compiled": CompilationMode.VLLM_COMPILE}, "--enforce-eager"),
]


@pytest.mark.parametrize(
    ("refuse_unsupported", "changed", "reason"),
    [(module.refuse_unsupported, *case) for module in (v1, v2) for case in COMMON]
    + [(v1.refuse_unsupported, *case) for case in ONLY_V1],
)
def test_a_mode_in_which_readouts_would_be_wrong_is_refused_with_the_reason(
    refuse_unsupported: Callable[[Any], None], changed: Any, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_unsupported(config(**changed))


def test_what_the_adapters_were_written_for_is_accepted() -> None:
    v1.refuse_unsupported(config())
    v1.refuse_unsupported(config(tp=2))
    v1.refuse_unsupported(config(device="cpu", compiled=CompilationMode.VLLM_COMPILE))
    v2.refuse_unsupported(config(tp=2, graphs=CUDAGraphMode.FULL_AND_PIECEWISE, asynchronous=True))
    v2.refuse_unsupported(config(compiled=CompilationMode.VLLM_COMPILE))


@pytest.mark.parametrize("runner_class", [V1Runner, V2Runner])
def test_the_refusal_comes_before_the_model_is_loaded_and_an_engine_without_taps_is_left_alone(
    runner_class: Any,
) -> None:
    plugin.register()
    runner: Any = SimpleNamespace(vllm_config=config(pp=2))
    with pytest.raises(UnsupportedModelError, match="pipeline parallelism"):
        runner_class.load_model(runner)
    runner.vllm_config.additional_config = {}
    with pytest.raises(AttributeError):  # vLLM's own method runs, and misses the rest of a real runner
        runner_class.load_model(runner)
