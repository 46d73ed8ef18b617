"""The V1 adapter: what it cannot read exactly is refused at start, and vLLM still has the names that it relies on."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.renderers.hf import HfRenderer
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from guard.mia import plugin
from guard.mia.runners.v1 import refuse_unsupported
from guard.mia.taps import UnsupportedModelError


def config(**changed: Any) -> Any:
    values = {
        "tp": 1,
        "pp": 1,
        "speculative": None,
        "asynchronous": False,
        "device": "cuda",
        "graphs": CUDAGraphMode.NONE,
    } | changed
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=values["tp"], pipeline_parallel_size=values["pp"]),
        speculative_config=values["speculative"],
        scheduler_config=SimpleNamespace(async_scheduling=values["asynchronous"]),
        compilation_config=SimpleNamespace(cudagraph_mode=values["graphs"]),
        device_config=SimpleNamespace(device_type=values["device"]),
    )


def test_what_the_adapter_was_written_for_is_accepted() -> None:
    refuse_unsupported(config())
    refuse_unsupported(config(device="cpu", graphs=CUDAGraphMode.FULL_AND_PIECEWISE))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tp": 2}, "tensor parallelism"),
        ({"pp": 2}, "pipeline parallelism"),
        ({"speculative": object()}, "speculative decoding"),
        ({"asynchronous": True}, "--no-async-scheduling"),
        ({"graphs": CUDAGraphMode.FULL_AND_PIECEWISE}, "--enforce-eager"),
    ],
)
def test_a_mode_in_which_readouts_would_be_wrong_is_refused_with_the_reason(changed: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_unsupported(config(**changed))


NAMES = [
    (GPUModelRunner, ("load_model", "_update_states", "_prepare_inputs", "sample_tokens")),
    (Scheduler, ("update_from_output",)),
    (HfRenderer, ("render_messages", "render_messages_async")),
    (AsyncLLM, ("generate",)),
    (InputProcessor, ("process_inputs",)),
    (OutputProcessor, ("add_request", "process_outputs")),
    (ModelRunnerOutput, ("__dataclass_fields__",)),
]


@pytest.mark.parametrize(("owner", "names"), NAMES, ids=lambda value: getattr(value, "__name__", ""))
def test_vllm_has_the_methods_that_are_wrapped(owner: type, names: tuple[str, ...]) -> None:
    assert [name for name in names if not hasattr(owner, name)] == []


def test_vllm_has_the_fields_and_arguments_that_are_read() -> None:
    assert "kv_transfer_params" in EngineCoreOutput.__struct_fields__
    assert {"external_req_id", "request_index"} <= set(inspect.signature(RequestState.__init__).parameters)
    assert list(inspect.signature(AsyncLLM.generate).parameters)[:4] == [
        "self",
        "prompt",
        "sampling_params",
        "request_id",
    ]
    source = inspect.getsource(GPUModelRunner)
    for name in ("query_start_loc", "num_computed_tokens_cpu", "max_num_tokens", "max_num_reqs"):
        assert name in source


def test_another_vllm_version_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_installed", False)
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.30.1")
    with pytest.raises(RuntimeError, match=r"0\.30\.1.*VLLM_PLUGINS"):
        plugin.register()
