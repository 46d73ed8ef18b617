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


@contextmanager
def engine(folder: Path, config: EngineConfig, *, compiled: bool = False, **vllm_args: Any) -> Iterator[MiaLLM]:
    """A ``MiaLLM`` on the model in ``folder``. A step holds 128 tokens, so that longer prompts take several chunks."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    defaults = {
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 2**26,
        "dtype": "float32",
        "enforce_eager": not compiled,
    }
    with patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
        try:
            with MiaLLM(folder, config, **defaults | vllm_args) as llm:
                yield llm
        finally:
            cleanup_dist_env_and_memory()
