"""Loaded with ``pytest -p``: engines of this process are what vLLM makes of a GPU when it is told nothing.

The V2 runner, compiled, under CUDA graphs, with asynchronous scheduling, whatever a test asks for. Floats of 32 bits
are multiplied as such, where Triton's attention would take 19 of them.
"""

from __future__ import annotations

import os

os.environ["TRITON_F32_DEFAULT"] = "ieee"

from tests.engine import engines

engines.ENVIRONMENT["VLLM_USE_V2_MODEL_RUNNER"] = "1"
engines.OVERRIDES.update(enforce_eager=False, async_scheduling=True)
# The caches have their own size; this is what vLLM wants to be free when it starts, beside other engines.
engines.OVERRIDES.update(gpu_memory_utilization=0.1)
