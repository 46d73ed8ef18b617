"""The adapter for vLLM 0.29's V2 model runner, which vLLM takes on CUDA unless told otherwise; eager execution.

Relies on (vLLM 0.29): GPUModelRunner.{load_model, finish_requests, add_requests, prepare_inputs, _dummy_run,
sample_tokens, max_num_reqs, max_num_tokens, model, dtype, device, vllm_config}, InputBatch.{req_ids, num_reqs,
query_start_loc_np, num_computed_tokens_np, num_scheduled_tokens, prefill_len_np}, SchedulerOutput.{scheduled_new_reqs,
finished_req_ids}, NewRequestData.{req_id, sampling_params, prompt_len}, AsyncOutput.model_runner_output. Under
synchronous scheduling without speculation ``num_computed_tokens_np`` is exact, else only an upper bound.
A runner without configured taps keeps vLLM's methods' cost to one attribute look-up a step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from guard.mia.patching import wrap
from guard.mia.routing import BatchView
from guard.mia.runners.adapter import adapter_of, dummy_run, load_model
from guard.mia.runners.handover import attach
from guard.mia.runners.refusals import common_reasons, refuse

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch


def refuse_unsupported(config: VllmConfig) -> None:
    """Raise ``UnsupportedModelError`` for a mode in which readouts would be wrong or missing."""
    compilation = config.compilation_config
    compiles = compilation.mode not in (None, CompilationMode.NONE)
    has_graphs = compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE)
    more = {
        "tensor parallelism": config.parallel_config.tensor_parallel_size > 1,
        "CUDA graphs and compilation (add --enforce-eager)": compiles or has_graphs,
    }
    refuse("V2", common_reasons(config) | more)


def install() -> None:
    """Wrap the runner's methods. Safe to call once per process, before any engine exists."""
    wrap(GPUModelRunner, "load_model", partial(load_model, refuse_unsupported))
    wrap(GPUModelRunner, "finish_requests", _finish_requests)
    wrap(GPUModelRunner, "add_requests", _add_requests)
    wrap(GPUModelRunner, "prepare_inputs", _prepare_inputs)
    wrap(GPUModelRunner, "_dummy_run", dummy_run)
    wrap(GPUModelRunner, "sample_tokens", _sample_tokens)


def _finish_requests(original: Any, runner: GPUModelRunner, scheduled: SchedulerOutput) -> None:
    original(runner, scheduled)
    if (adapter := adapter_of(runner)) is not None:
        # vLLM's method frees the preempted as well; they come back as new requests and go on.
        adapter.end(scheduled.finished_req_ids)


def _add_requests(original: Any, runner: GPUModelRunner, scheduled: SchedulerOutput) -> None:
    original(runner, scheduled)
    if (adapter := adapter_of(runner)) is not None:
        for request in scheduled.scheduled_new_reqs:
            adapter.admit(request.req_id, request.sampling_params, request.prompt_len)


def _prepare_inputs(original: Any, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> InputBatch:
    batch: InputBatch = original(runner, *args, **kwargs)
    if (adapter := adapter_of(runner)) is not None:
        adapter.before_forward(_batch_view(batch))
    return batch


def _batch_view(batch: InputBatch) -> BatchView:
    """The batch in its own order, which is not the scheduler's, and without the rows that pad it."""
    starts, computed = batch.query_start_loc_np[: batch.num_reqs + 1], batch.num_computed_tokens_np
    samples = computed + batch.num_scheduled_tokens >= batch.prefill_len_np
    return BatchView(batch.req_ids, starts, computed, samples)


def _sample_tokens(original: Any, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    adapter = adapter_of(runner)
    record = adapter.after_forward() if adapter is not None else None
    output = original(runner, *args, **kwargs)
    if record is not None:
        attach(output.model_runner_output, record)
    return output
