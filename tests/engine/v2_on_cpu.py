"""Loaded with ``pytest -p``: engines of this process use vLLM's V2 model runner, on a CPU.

V2's own kernels are written in Triton, whose published package compiles for GPUs alone, so the CPU build of vLLM turns
Triton and with it V2 off. Triton's interpreter runs the same kernels on the host. The switch must be set before vLLM is
imported, and cannot be taken back in the same process.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

_importing = ModuleType("vllm.triton_utils.importing")
_importing.HAS_TRITON = True  # type: ignore[attr-defined]
_importing.TritonPlaceholder = _importing.TritonLanguagePlaceholder = ModuleType  # type: ignore[attr-defined]
sys.modules[_importing.__name__] = _importing

import triton.language as tl  # noqa: E402
import vllm.v1.worker.gpu.model_runner  # noqa: E402, F401 - its kernels are to be interpreted
from triton.language.extra import libdevice  # noqa: E402

# Ours have tests of their own: here their references run, in a hundredth of the time.
del os.environ["TRITON_INTERPRET"]
from guard.mia import ops  # noqa: E402, F401

os.environ["TRITON_INTERPRET"] = "1"

from tests.engine import engines  # noqa: E402


def _log1p(x: Any) -> Any:
    """A function of CUDA's device library, which the interpreter does not have; random sampling needs it."""
    return tl.log(1.0 + x)


libdevice.log1p = _log1p
engines.ENVIRONMENT["VLLM_USE_V2_MODEL_RUNNER"] = "1"
