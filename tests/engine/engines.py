"""Engines inside the test's own process: seconds to start, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM

DEFAULTS = {
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 2**26,
    "dtype": "float32",
    "async_scheduling": False,
}

# What a plugin of pytest says of all engines, whatever a test asks for: see ``graphs_on_cuda``.
OVERRIDES: dict[str, Any] = {}

# The CPU build of vLLM has no other runner; on CUDA, V1 must be asked for.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}


@contextmanager
def in_process() -> Iterator[None]:
    """Engines made inside run in this process; what they leave behind is cleaned up at the end."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with patch.dict(os.environ, ENVIRONMENT):
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


@contextmanager
def vanilla(folder: Path, *, compiled: bool = False) -> Iterator[Any]:
    """vLLM itself, with the plugin installed and no taps configured."""
    from vllm import LLM

    with in_process():
        llm = LLM(model=str(folder), **DEFAULTS | {"enforce_eager": not compiled} | OVERRIDES)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


@contextmanager
def engine(folder: Path, config: EngineConfig, *, compiled: bool = False, **vllm_args: Any) -> Iterator[MiaLLM]:
    """A ``MiaLLM`` on the model in ``folder``. A step holds 128 tokens, so that longer prompts take several chunks."""
    arguments = DEFAULTS | {"enforce_eager": not compiled} | vllm_args | OVERRIDES
    with in_process(), MiaLLM(folder, config, **arguments) as llm:
        yield llm
