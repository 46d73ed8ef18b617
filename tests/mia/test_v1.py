"""The V1 adapter: vLLM still has the names that it relies on."""

from __future__ import annotations

import inspect

import pytest
from vllm.renderers.hf import HfRenderer
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from guard.mia import plugin

NAMES = [
    (GPUModelRunner, ("load_model", "_update_states", "_prepare_inputs", "_dummy_run", "sample_tokens")),
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
