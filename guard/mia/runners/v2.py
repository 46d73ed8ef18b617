"""The adapter for vLLM 0.29's V2 model runner, which vLLM takes on CUDA unless told otherwise: eager, compiled, and
under CUDA graphs, with either scheduling.

Relies on (vLLM 0.29): GPUModelRunner.{load_model, initialize_kv_cache, finish_requests, add_requests, prepare_inputs,
_dummy_run, sample_tokens, max_num_reqs, max_num_tokens, model, dtype, device, vllm_config, kv_cache_config,
block_tables}, InputBatch.{req_ids, num_reqs, idx_mapping_np, query_start_loc_np, num_computed_tokens_np,
num_scheduled_tokens, prefill_len_np}, SchedulerOutput.{scheduled_new_reqs, finished_req_ids},
NewRequestData.{req_id, sampling_params, prompt_len}, AsyncOutput.get_output, which waits for all that the stream had to
do before; BlockTables.block_tables, by group; a layer's ``kv_cache``, ``[blocks, key heads,
block size, 2 head_size]``. Without speculation ``num_computed_tokens_np`` is exact, else only an upper bound.
A runner without configured taps keeps vLLM's methods' cost to one attribute look-up a step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from guard.mia.patching import wrap
from guard.mia.plan import BatchView
from guard.mia.runners.adapter import Adapter, adapter_of, dummy_run, load_model
from guard.mia.runners.handover import attach
from guard.mia.runners.refusals import common_reasons, refuse
from guard.mia.taps import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from guard.mia.paged_keys import LayerCache


MESSAGE_ATTRIBUTE = "mia_message"
"""Name under which a step's output keeps what makes its message, once it is complete."""


def refuse_unsupported(config: VllmConfig) -> None:
    """Raise ``UnsupportedModelError`` for a mode in which readouts would be wrong or missing."""
    refuse("V2", common_reasons(config))


def gathers_keys(device: torch.device) -> bool:
    """On a CPU the backend packs its cache in a layout of its own."""
    return device.type == "cpu"


def install() -> None:
    """Wrap the runner's methods. Safe to call once per process, before any engine exists."""
    wrap(GPUModelRunner, "load_model", partial(load_model, refuse_unsupported, gathers_keys))
    wrap(GPUModelRunner, "initialize_kv_cache", _initialize_kv_cache)
    wrap(GPUModelRunner, "finish_requests", _finish_requests)
    wrap(GPUModelRunner, "add_requests", _add_requests)
    wrap(GPUModelRunner, "prepare_inputs", _prepare_inputs)
    wrap(GPUModelRunner, "_dummy_run", dummy_run)
    wrap(GPUModelRunner, "sample_tokens", _sample_tokens)
    wrap(AsyncOutput, "get_output", _get_output)


def _initialize_kv_cache(original: Any, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> None:
    """vLLM does so twice: a small cache to see what graphs take, and then the real one."""
    original(runner, *args, **kwargs)
    adapter = adapter_of(runner)
    if adapter is not None and adapter.buffers.query and not adapter.router.gathers_keys:
        from guard.mia.paged_keys import PagedKeys

        caches = {layer: _cache_of(runner, adapter, layer) for layer in adapter.buffers.query}
        adapter.reader.keys = PagedKeys(caches, adapter.buffers.query_pool)
    if adapter is not None:
        adapter.reader.warm_up()


def _cache_of(runner: GPUModelRunner, adapter: Adapter, layer: int) -> LayerCache:
    """Raises ``UnsupportedModelError`` where the cache does not hold keys as they are."""
    from guard.mia.paged_keys import ALIGNED_ELEMENTS, LayerCache

    attention, shape = adapter.decoder.attention[layer], adapter.buffers.attention_shapes[layer]
    name, kv = attention.layer_name, attention.kv_cache
    groups = runner.kv_cache_config.kv_cache_groups
    group = next(i for i, one in enumerate(groups) if name in one.layer_names)
    if kv.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModelError(f"attention readouts: {name} keeps its keys as {kv.dtype}, not as they are")
    if kv.dim() != 4 or (kv.shape[1], kv.shape[3]) != (shape.key_heads, 2 * shape.head_size):
        raise UnsupportedModelError(f"attention readouts do not know a key cache of {list(kv.shape)} ({name})")
    if any(size % ALIGNED_ELEMENTS for size in (shape.head_size, *kv.stride()[:3])) or kv.data_ptr() % 16:
        raise UnsupportedModelError(f"attention readouts: {name} has heads of {shape.head_size}, not a multiple of 8")
    return LayerCache(kv, runner.block_tables.block_tables[group].gpu, shape)


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
    if (adapter := adapter_of(runner)) is not None and not adapter.router.idle:
        adapter.before_forward(_batch_view(batch))
    return batch


def _batch_view(batch: InputBatch) -> BatchView:
    """The batch in its own order, which is not the scheduler's, and without the rows that pad it."""
    starts, computed = batch.query_start_loc_np[: batch.num_reqs + 1], batch.num_computed_tokens_np
    samples = computed + batch.num_scheduled_tokens >= batch.prefill_len_np
    return BatchView(batch.req_ids, starts, computed, samples, batch.idx_mapping_np)


def _sample_tokens(original: Any, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    adapter = adapter_of(runner)
    copies = adapter.after_forward() if adapter is not None else None
    output = original(runner, *args, **kwargs)
    if adapter is not None and copies is not None:
        setattr(output, MESSAGE_ATTRIBUTE, partial(adapter.writer.message, copies))
    return output


def _get_output(original: Any, output: AsyncOutput) -> ModelRunnerOutput:
    """Where vLLM waits for the step, after it has told the device what to do next."""
    result: ModelRunnerOutput = original(output)
    if (message := getattr(output, MESSAGE_ATTRIBUTE, None)) is not None:
        attach(result, message())
    return result
