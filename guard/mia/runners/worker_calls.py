"""What the front end may call on every worker, through vLLM's ``collective_rpc``.

Relies on (vLLM 0.29): v1.worker.gpu_worker.Worker, of which the CPU's worker is a subclass, and its ``model_runner``.
A call answers with plain values; None where it has nothing to say, or why it refused.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from guard.mia.runners.adapter import ADAPTER_ATTRIBUTE, Adapter, VectorInUseError
from guard.mia.steering import FullBankError, SteeringFolderError


def install() -> None:
    """Give the worker its methods. Safe to call once per process."""
    for name, method in (
        ("mia_vectors", _vectors),
        ("mia_load_vector", _load_vector),
        ("mia_evict_vector", _evict_vector),
    ):
        setattr(Worker, name, method)


def _adapter(worker: Any) -> Adapter:
    adapter: Adapter = getattr(worker.model_runner, ADAPTER_ATTRIBUTE)
    return adapter


def _vectors(worker: Any) -> dict[str, str]:
    return _adapter(worker).vectors()


def _load_vector(worker: Any, name: str) -> tuple[str, str] | None:
    try:
        _adapter(worker).load_vector(name)
    except FullBankError as error:
        return "full", str(error)
    except VectorInUseError as error:
        return "in_use", str(error)
    except SteeringFolderError as error:
        return "unusable", str(error)
    return None


def _evict_vector(worker: Any, name: str) -> tuple[str, str] | None:
    try:
        _adapter(worker).evict_vector(name)
    except VectorInUseError as error:
        return "in_use", str(error)
    return None
