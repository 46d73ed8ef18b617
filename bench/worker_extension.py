"""What the harness adds to every engine's worker: a report, a profile of the device, and the forward hooks that most
tools use.

Mixed into vLLM's worker by ``worker_extension_cls``, the same for all variants; does nothing until it is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_ACTIVITY = {True: ProfilerActivity.CUDA, False: ProfilerActivity.CPU}


class BenchExtension:
    """Methods for ``collective_rpc``. ``self`` is vLLM's worker."""

    def bench_report(self) -> dict[str, Any]:
        """Which runner it is, and bytes of device memory that its tensors and its allocator hold."""
        runner = self.model_runner  # type: ignore[attr-defined]
        report: dict[str, Any] = {"runner": f"{type(runner).__module__}.{type(runner).__name__}"}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            report["allocated_bytes"] = torch.cuda.memory_allocated()
            report["reserved_bytes"] = torch.cuda.memory_reserved()
        config = runner.vllm_config
        report["cudagraph_mode"] = str(config.compilation_config.cudagraph_mode)
        report["async_scheduling"] = bool(config.scheduler_config.async_scheduling)
        return report

    def bench_profile_start(self) -> None:
        self.bench_profile = profile(activities=[_ACTIVITY[torch.cuda.is_available()]])
        self.bench_profile.start()

    def bench_profile_stop(self) -> dict[str, list[float]]:
        """Kernels, copies and fills that ran since the start, also those of a replayed graph: how often, and for how
        many microseconds in all. On the CPU, which a rehearsal has: its operators."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.bench_profile.stop()
        wanted = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
        found: dict[str, list[float]] = {}
        profiler: Any = self.bench_profile.profiler
        for event in profiler.kineto_results.events():
            if event.device_type() == wanted:
                one = found.setdefault(event.name(), [0, 0.0])
                one[0] += 1
                one[1] += event.duration_ns() / 1e3
        return found

    def bench_install_hooks(self, layers: list[int]) -> None:
        """After each of ``layers``, counted from 1, copy all rows of the residual stream to the host, and wait."""
        from guard.mia.taps import find_decoder

        blocks = find_decoder(self.model_runner.get_model()).blocks  # type: ignore[attr-defined]
        self.bench_rows: dict[int, torch.Tensor] = {}
        self.bench_copies = 0

        def copy(layer: int) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                hidden, residual = output
                self.bench_rows[layer] = (hidden + residual).cpu()
                self.bench_copies += 1

            return hook

        for layer in layers:
            blocks[layer].register_forward_hook(copy(layer))

    def bench_hook_copies(self) -> int:
        """Copies that the hooks have made so far."""
        return self.bench_copies
