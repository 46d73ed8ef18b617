"""What every model runner's adapter shares: taps after loading, entries before a step, readouts after it.

A runner's own file (``v1``, ``v2``) says when, and hands over one ``BatchView`` a step; nothing here knows which runner
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from guard.mia.buffers import StepLimits, TapBuffers
from guard.mia.engine_config import EngineConfig, configured
from guard.mia.plan import BatchView, StepPlan
from guard.mia.probes import load_probes
from guard.mia.readouts import Reader
from guard.mia.record import RecordWriter, StepCopies
from guard.mia.routing import Router
from guard.mia.row_ring import RowRing
from guard.mia.sharding import ALONE, HeadShard
from guard.mia.spec import MiaSpec
from guard.mia.steering import load_bank
from guard.mia.taps import EMBEDDING, UnsupportedModelError, attention_shape, find_decoder, insert

logger = init_logger("vllm.mia")

ADAPTER_ATTRIBUTE = "mia"
"""Name under which a model runner keeps its adapter."""


def head_shard() -> HeadShard:
    """This rank's part of the attention heads. Sums go over the ranks' devices, or their processes on the host."""
    group = get_tp_group()
    if group.world_size == 1:
        return ALONE

    def add_up(values: torch.Tensor) -> None:
        over = group.cpu_group if values.device.type == "cpu" else group.device_group
        torch.distributed.all_reduce(values, group=over)

    return HeadShard(group.rank_in_group, group.world_size, 1, add_up)


class Adapter:
    """One per model runner. Made when the model is loaded, before any forward pass and any graph.

    ``gathers_keys``: keys pass taps, where the runner's cache cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        config: EngineConfig,
        limits: StepLimits,
        dtype: torch.dtype,
        device: torch.device,
        gathers_keys: bool,
    ) -> None:
        self.decoder = decoder = find_decoder(model)
        wanted = {*config.steering_layers, *(layer for layer, _ in config.attention_heads)}
        wanted |= set(config.tapped_layers) - {EMBEDDING}
        if unknown := sorted(wanted - decoder.blocks.keys()):
            raise UnsupportedModelError(f"mia names layers {unknown}; this model has blocks 1 to {len(decoder.blocks)}")
        shapes = {layer: attention_shape(decoder.attention[layer]) for layer, _ in config.attention_heads}
        shard = head_shard()
        key_heads = vllm_config.model_config.get_total_num_kv_heads()
        shard = replace(shard, replicas=max(1, shard.size // key_heads))
        if bad := [head for head in config.attention_heads if head[1] >= shard.size * shapes[head[0]].query_heads]:
            raise UnsupportedModelError(f"mia names heads {bad}, layers counted from 1, that this model does not have")
        hidden_size = vllm_config.model_config.get_hidden_size()
        self.bank = load_bank(
            config.steering_folder, config.steering_vectors, hidden_size, device, config.bank_capacity
        )
        probes = load_probes(config.probe_folder, config.probes, hidden_size, device)
        self.buffers = TapBuffers.allocate(
            config, hidden_size, shapes, limits, self.bank.vectors, dtype, shard, gathers_keys
        )
        self.router = Router(self.buffers, self.bank, probes, config.max_host_bytes, shard)
        shared_bytes = config.max_shared_bytes if config.hidden_layers and shard.rank == 0 else 0
        ring = RowRing(shared_bytes, hidden_size, dtype, pinned=device.type == "cuda")
        self.reader = Reader(self.router, self.buffers, probes, ring, shard)
        self.writer = RecordWriter(ring.address)
        self._plan: StepPlan | None = None
        self._forwarded = False
        insert(decoder, self.buffers)
        sizes = self.buffers.sizes_bytes()
        logger.info(
            "mia: hidden-state taps at layers %s, attention taps for %d heads, steering at layers %s with %d vectors; "
            "device memory %.1f MiB (%s)",
            list(config.hidden_layers),
            len(config.attention_heads),
            list(config.steering_layers),
            len(config.steering_vectors),
            sum(sizes.values()) / 2**20,
            ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items()),
        )

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have finished. A preempted request has not: it is computed again and goes on."""
        for request_id in request_ids:
            self.router.remove(request_id)

    def admit(self, request_id: str, sampling_params: Any, prompt_len: int) -> None:
        """A request is scheduled for the first time, or again after its preemption."""
        self.buffers.control.serves = True
        extra = sampling_params.extra_args if sampling_params is not None else None
        if not extra or (asked := extra.get("mia")) is None or request_id in self.router.requests:
            return
        # Checked by the API server already: a failure here is a bug and may stop the engine.
        spec = MiaSpec.from_wire(asked["spec"])
        if spec.asks:
            self.router.add(request_id, spec, prompt_len)

    def before_forward(self, batch: BatchView) -> None:
        self.reader.before_forward()
        self._plan = self.router.fill(batch)

    def before_dummy(self) -> None:
        """A forward pass without requests follows: what the last step filled in would point into its rows."""
        self.buffers.control.serves = False
        self.router.clear()

    def after_forward(self) -> StepCopies | None:
        """What the step has read."""
        plan, self._plan = self._plan, None
        if plan is None:
            return None
        if not self._forwarded:
            # Models run through transformers' code set their attention scale in their first forward pass; on a CPU
            # without compilation there is no warm-up, and this was it.
            shapes = {layer: attention_shape(self.decoder.attention[layer]) for layer in self.buffers.query}
            self.buffers.attention_shapes.update(shapes)
            self._forwarded = True
        return self.reader.read(plan)


def adapter_of(runner: Any) -> Adapter | None:
    """The runner's adapter; None when its engine has no taps."""
    return getattr(runner, ADAPTER_ATTRIBUTE, None)


def load_model(
    refuse_unsupported: Callable[[VllmConfig], None],
    gathers_keys: Callable[[torch.device], bool],
    original: Any,
    runner: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """A runner's ``load_model``: where taps are configured, the refusals before it and the adapter after it."""
    config = configured(runner.vllm_config.additional_config)
    if config is not None:
        refuse_unsupported(runner.vllm_config)
    original(runner, *args, **kwargs)
    if config is None or adapter_of(runner) is not None:
        return
    limits = StepLimits(runner.max_num_reqs, runner.max_num_tokens)
    gathers = gathers_keys(runner.device)
    adapter = Adapter(runner.model, runner.vllm_config, config, limits, runner.dtype, runner.device, gathers)
    setattr(runner, ADAPTER_ATTRIBUTE, adapter)


def dummy_run(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """A runner's ``_dummy_run``: profiling, warm-up, and what a data-parallel rank without work runs. No rows are
    anyone's."""
    if (adapter := adapter_of(runner)) is not None:
        adapter.before_dummy()
    return original(runner, *args, **kwargs)
