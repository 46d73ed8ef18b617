"""The adapter for vLLM 0.29's V1 model runner: the CPU build's runner, and CUDA with eager execution.

Relies on (vLLM 0.29): GPUModelRunner.{load_model, _update_states, _prepare_inputs, sample_tokens, input_batch,
query_start_loc, max_num_tokens, max_num_reqs}, InputBatch.{req_ids, num_reqs, num_computed_tokens_cpu,
num_tokens_no_spec, token_ids_cpu}, CPUModelRunner.load_model, SchedulerOutput.{scheduled_new_reqs, finished_req_ids},
ModelRunnerOutput, Scheduler.update_from_output, EngineCoreOutput.kv_transfer_params.
Hands everything else one ``BatchView`` a step. A runner without configured taps keeps vLLM's methods' cost to one
attribute look-up a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from guard.mia.buffers import StepLimits, TapBuffers
from guard.mia.engine_config import EngineConfig, configured
from guard.mia.patching import wrap
from guard.mia.readouts import StepReading, read_step
from guard.mia.results import Readouts, item_to_wire
from guard.mia.routing import BatchView, Router, StepPlan
from guard.mia.spec import parse_spec
from guard.mia.steering import load_bank
from guard.mia.taps import UnsupportedModelError, attention_shape, find_decoder, insert

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger("vllm.mia")

ADAPTER_ATTRIBUTE = "mia"
"""Name under which a model runner keeps its adapter."""

OUTPUT_ATTRIBUTE = "mia_readouts"
"""Name under which a ModelRunnerOutput carries readouts from the worker to the scheduler's process."""


class V1Adapter:
    """One per model runner: taps inserted after loading, entries written before and readouts taken after each step."""

    def __init__(self, runner: GPUModelRunner, config: EngineConfig) -> None:
        refuse_unsupported(runner.vllm_config)
        decoder = find_decoder(runner.model)
        wanted = {*config.hidden_layers, *config.steering_layers, *(layer for layer, _ in config.attention_heads)}
        if unknown := sorted(wanted - decoder.blocks.keys()):
            raise UnsupportedModelError(f"mia names layers {unknown}; this model has blocks 1 to {len(decoder.blocks)}")
        shapes = {layer: attention_shape(decoder.attention[layer]) for layer, _ in config.attention_heads}
        if bad := [head for head in config.attention_heads if head[1] >= shapes[head[0]].query_heads]:
            raise UnsupportedModelError(f"mia names heads {bad} that this model does not have")
        hidden_size = runner.model_config.get_hidden_size()
        bank = load_bank(config.steering_folder, config.steering_vectors, hidden_size, runner.device)
        limits = StepLimits(runner.max_num_reqs, runner.max_num_tokens)
        dtype = cast(torch.dtype, runner.dtype)
        self.buffers = TapBuffers.allocate(config, hidden_size, shapes, limits, bank.vectors, dtype)
        self.router = Router(self.buffers, bank, config.max_host_bytes)
        self._decoder = decoder
        self._plan: StepPlan | None = None
        self._started = False
        insert(decoder, self.buffers)
        logger.info(
            "mia: hidden-state taps at layers %s, attention taps for %d heads, steering at layers %s with %d vectors; "
            "buffers %.1f MiB",
            list(config.hidden_layers),
            len(config.attention_heads),
            list(config.steering_layers),
            len(config.steering_vectors),
            self.buffers.size_bytes / 2**20,
        )

    def update_requests(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.finished_req_ids:
            self.router.remove(request_id)
        for request in scheduled.scheduled_new_reqs:
            extra = request.sampling_params.extra_args if request.sampling_params else None
            if extra and (text := extra.get("mia")) is not None:
                # Parsed and checked by the API server already: a failure here is a bug and may stop the engine.
                spec = parse_spec(text)
                if spec.asks:
                    self.router.add(request.req_id, spec, len(request.prompt_token_ids or ()))

    def before_forward(self, runner: GPUModelRunner) -> None:
        if not self._started:
            # Models run through transformers' code set their attention scale in the first forward pass, the warm-up.
            shapes = {layer: attention_shape(self._decoder.attention[layer]) for layer in self.buffers.query}
            self.buffers.attention_shapes.update(shapes)
            self._started = True
        batch = runner.input_batch
        n = batch.num_reqs
        self._plan = self.router.fill(
            BatchView(
                batch.req_ids,
                runner.query_start_loc.np[: n + 1],
                batch.num_computed_tokens_cpu[:n],
                batch.num_tokens_no_spec[:n],
                batch.token_ids_cpu,
            )
        )

    def take_readouts(self) -> dict[str, dict[str, Any]]:
        """Wire forms of what this step gives to send, by engine request id."""
        plan, self._plan = self._plan, None
        if plan is None:
            return {}
        readings = read_step(self.router, self.buffers, plan)
        return {
            request_id: _reading_to_wire(reading, self.router.requests[request_id].prompt_len)
            for request_id, reading in readings.items()
        }


def _reading_to_wire(reading: StepReading, prompt_len: int) -> dict[str, Any]:
    prompt = None if reading.prompt is None else Readouts(reading.prompt, prompt_tokens=prompt_len).to_wire()
    return {"prompt": prompt, "grown": {name: item_to_wire(rows) for name, rows in reading.grown.items()}}


def refuse_unsupported(config: VllmConfig) -> None:
    """Raise ``UnsupportedModelError`` for a mode in which readouts would be wrong or missing."""
    parallel = config.parallel_config
    reasons = {
        "tensor parallelism": parallel.tensor_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "asynchronous scheduling (add --no-async-scheduling)": bool(config.scheduler_config.async_scheduling),
        "CUDA graphs (add --enforce-eager)": config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)
        and config.device_config.device_type == "cuda",
    }
    if refused := [name for name, present in reasons.items() if present]:
        raise UnsupportedModelError(f"mia on the V1 runner does not support: {', '.join(refused)}")


def install() -> None:
    """Wrap the runner's and the scheduler's methods. Safe to call once per process, before any engine exists."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2

    wrap(GPUModelRunnerV2, "load_model", _refuse_v2)
    for runner_class in (GPUModelRunner, CPUModelRunner):
        wrap(runner_class, "load_model", _load_model)
    wrap(GPUModelRunner, "_update_states", _update_states)
    wrap(GPUModelRunner, "_prepare_inputs", _prepare_inputs)
    wrap(GPUModelRunner, "sample_tokens", _sample_tokens)
    wrap(Scheduler, "update_from_output", _update_from_output)


def _load_model(original: Any, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> None:
    original(runner, *args, **kwargs)
    config = configured(runner.vllm_config.additional_config)
    if config is not None and getattr(runner, ADAPTER_ATTRIBUTE, None) is None:
        setattr(runner, ADAPTER_ATTRIBUTE, V1Adapter(runner, config))


def _refuse_v2(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Without this, taps that were asked for would silently not be there."""
    if configured(runner.vllm_config.additional_config) is not None:
        raise UnsupportedModelError(
            "mia has no adapter for vLLM's V2 model runner yet: set VLLM_USE_V2_MODEL_RUNNER=0 and add "
            "--enforce-eager --no-async-scheduling"
        )
    original(runner, *args, **kwargs)


def _update_states(original: Any, runner: GPUModelRunner, scheduled: SchedulerOutput) -> Any:
    adapter: V1Adapter | None = getattr(runner, ADAPTER_ATTRIBUTE, None)
    if adapter is not None:
        adapter.update_requests(scheduled)
    return original(runner, scheduled)


def _prepare_inputs(original: Any, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    prepared = original(runner, *args, **kwargs)
    adapter: V1Adapter | None = getattr(runner, ADAPTER_ATTRIBUTE, None)
    if adapter is not None:
        adapter.before_forward(runner)
    return prepared


def _sample_tokens(original: Any, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    output = original(runner, *args, **kwargs)
    adapter: V1Adapter | None = getattr(runner, ADAPTER_ATTRIBUTE, None)
    if adapter is not None and (readouts := adapter.take_readouts()):
        setattr(output, OUTPUT_ATTRIBUTE, readouts)
    return output


def _update_from_output(
    original: Any, scheduler: Scheduler, scheduled: SchedulerOutput, output: ModelRunnerOutput
) -> Any:
    """Move readouts from the worker's output onto the outputs of their requests, on their way to the API server."""
    by_client = original(scheduler, scheduled, output)
    readouts: dict[str, dict[str, Any]] | None = getattr(output, OUTPUT_ATTRIBUTE, None)
    if readouts:
        for outputs in by_client.values():
            for one in outputs.outputs:
                if (wire := readouts.get(one.request_id)) is not None:
                    one.kv_transfer_params = {**(one.kv_transfer_params or {}), "mia": wire}
    return by_client
