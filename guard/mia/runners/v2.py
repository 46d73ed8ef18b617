"""vLLM 0.29's V2 model runner, which exists on CUDA alone: refused until its adapter is here."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from guard.mia.engine_config import configured
from guard.mia.patching import wrap
from guard.mia.taps import UnsupportedModelError


def install() -> None:
    """Wrap the runner's methods. Safe to call once per process, before any engine exists."""
    wrap(GPUModelRunner, "load_model", _load_model)


def _load_model(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Without this, taps that were asked for would silently not be there."""
    if configured(runner.vllm_config.additional_config) is not None:
        raise UnsupportedModelError(
            "mia has no adapter for vLLM's V2 model runner yet: set VLLM_USE_V2_MODEL_RUNNER=0 and add "
            "--enforce-eager --no-async-scheduling"
        )
    original(runner, *args, **kwargs)
