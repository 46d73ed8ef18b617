"""What the front end may call on every worker, through vLLM's ``collective_rpc``.

Relies on (vLLM 0.29): v1.worker.gpu_worker.Worker, of which the CPU's worker is a subclass, and its ``model_runner``;
EngineCore.collective_rpc, which runs between two steps, and Scheduler.requests, all that have not ended. A call answers
with plain values: None where it has nothing to say, or why it refused.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker

from guard.mia.patching import wrap
from guard.mia.runners.adapter import adapter_of
from guard.mia.spec import MiaSpec
from guard.mia.steering import Bank, FullBankError, SteeringFolderError

CHANGES = ("mia_load_vector", "mia_evict_vector")
"""Calls that change the vector that is their first argument."""


def install() -> None:
    """Give the worker its methods, and the engine the check before them. Safe to call once per process."""
    for name, method in (
        ("mia_vectors", _vectors),
        ("mia_load_vector", _load_vector),
        ("mia_evict_vector", _evict_vector),
    ):
        setattr(Worker, name, method)
    wrap(EngineCore, "collective_rpc", _collective_rpc)


def _collective_rpc(
    original: Any, engine: EngineCore, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
) -> Any:
    if method in CHANGES and args[0] in _vectors_in_use(engine):
        return [("in_use", f"steering vector {args[0]!r} is in use by a running request")]
    return original(engine, method, timeout, args, kwargs)


def _vectors_in_use(engine: EngineCore) -> set[str]:
    """Names that requests under way are steered by. The workers do not know which of theirs have ended."""
    requests: Any = engine.scheduler.requests  # type: ignore[attr-defined]
    asked = [(r.sampling_params.extra_args or {}).get("mia") for r in requests.values() if r.sampling_params]
    return {steer.vector for one in asked if one is not None for steer in MiaSpec.from_wire(one["spec"]).steer}


def _bank(worker: Any) -> Bank:
    adapter = adapter_of(worker.model_runner)
    assert adapter is not None, "asked of engines with taps alone"
    return adapter.bank


def _vectors(worker: Any) -> dict[str, str]:
    return dict(_bank(worker).digests)


def _load_vector(worker: Any, name: str) -> tuple[str, str] | None:
    bank = _bank(worker)
    try:
        bank.load(name)
    except FullBankError as error:
        return "full", str(error)
    except SteeringFolderError as error:
        # Where the operator's folder is, is nothing for clients.
        return "unusable", str(error).replace(f"{bank.folder}/", "")
    return None


def _evict_vector(worker: Any, name: str) -> None:
    _bank(worker).evict(name)
