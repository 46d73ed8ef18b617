"""Modes of vLLM in which readouts would be wrong or missing, whatever the runner. They are refused at start."""

from __future__ import annotations

from vllm.config import VllmConfig

from guard.mia.taps import UnsupportedModelError


def common_reasons(config: VllmConfig) -> dict[str, bool]:
    """By mode, whether this start asks for it."""
    parallel = config.parallel_config
    return {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        # The rows of one rank's forward pass are then no longer the batch's rows.
        "context parallelism": parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
        "sequence parallelism (pass_config.enable_sp)": bool(config.compilation_config.pass_config.enable_sp),
        "dual batch overlap": parallel.enable_dbo,
        "speculative decoding": config.speculative_config is not None,
        # Block-wise generation rewrites tokens that it has computed already.
        "diffusion language models": config.model_config.is_diffusion,
        "pooling models": config.model_config.runner_type == "pooling",
        # Its second level discards what was allocated with the weights, steering vectors and probes among it.
        "sleep mode": config.model_config.enable_sleep_mode,
    }


def refuse(runner: str, reasons: dict[str, bool]) -> None:
    """Raise ``UnsupportedModelError`` that names every mode that is asked for."""
    if refused := [name for name, present in reasons.items() if present]:
        raise UnsupportedModelError(f"mia on the {runner} runner does not support: {', '.join(refused)}")
