"""The adapter for vLLM 0.29's V1 model runner: the CPU build's runner, and CUDA with eager execution.

Relies on (vLLM 0.29): GPUModelRunner.{load_model, _update_states, _prepare_inputs, _dummy_run, sample_tokens,
input_batch, query_start_loc, max_num_tokens, max_num_reqs}, InputBatch.{req_ids, num_reqs, num_computed_tokens_cpu,
num_tokens_no_spec}, CPUModelRunner.load_model, SchedulerOutput.{scheduled_new_reqs, finished_req_ids}.
A runner without configured taps keeps vLLM's methods' cost to one attribute look-up a step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from guard.mia.patching import wrap
from guard.mia.plan import BatchView
from guard.mia.runners.adapter import adapter_of, dummy_run, load_model
from guard.mia.runners.handover import attach
from guard.mia.runners.refusals import common_reasons, refuse

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def refuse_unsupported(config: VllmConfig) -> None:
    """Raise ``UnsupportedModelError`` for a mode in which readouts would be wrong or missing."""
    compilation, on_cuda = config.compilation_config, config.device_config.device_type == "cuda"
    compiles = compilation.mode not in (None, CompilationMode.NONE)
    has_graphs = compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE)
    more = {
        "CUDA graphs and compilation (add --enforce-eager)": on_cuda and (compiles or has_graphs),
        "asynchronous scheduling (add --no-async-scheduling)": bool(config.scheduler_config.async_scheduling),
    }
    refuse("V1", common_reasons(config) | more)


def install() -> None:
    """Wrap the runner's methods. Safe to call once per process, before any engine exists."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for runner_class in (GPUModelRunner, CPUModelRunner):
        wrap(runner_class, "load_model", partial(load_model, refuse_unsupported, lambda device: True))
    wrap(GPUModelRunner, "_update_states", _update_states)
    wrap(GPUModelRunner, "_prepare_inputs", _prepare_inputs)
    wrap(GPUModelRunner, "_dummy_run", dummy_run)
    wrap(GPUModelRunner, "sample_tokens", _sample_tokens)


def _update_states(original: Any, runner: GPUModelRunner, scheduled: SchedulerOutput) -> Any:
    if (adapter := adapter_of(runner)) is not None:
        adapter.end(scheduled.finished_req_ids)
        for request in scheduled.scheduled_new_reqs:
            adapter.admit(request.req_id, request.sampling_params, len(request.prompt_token_ids or ()))
    return original(runner, scheduled)


def _prepare_inputs(original: Any, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    prepared = original(runner, *args, **kwargs)
    if (adapter := adapter_of(runner)) is not None and not adapter.router.idle:
        adapter.before_forward(_batch_view(runner))
    return prepared


def _batch_view(runner: GPUModelRunner) -> BatchView:
    batch = runner.input_batch
    n = batch.num_reqs
    starts, computed = runner.query_start_loc.np[: n + 1], batch.num_computed_tokens_cpu[:n]
    samples = computed + starts[1:] - starts[:-1] >= batch.num_tokens_no_spec[:n]
    return BatchView(batch.req_ids, starts, computed, samples)


def _sample_tokens(original: Any, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    adapter = adapter_of(runner)
    copies = adapter.after_forward() if adapter is not None else None
    output = original(runner, *args, **kwargs)
    if adapter is not None and copies is not None:
        attach(output, adapter.writer.message(copies))
    return output
