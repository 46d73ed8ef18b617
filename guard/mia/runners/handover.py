"""Readouts on their way from the worker to the API server, whatever the runner.

Relies on (vLLM 0.29): ModelRunnerOutput being a plain dataclass, Scheduler.update_from_output,
EngineCoreOutput.kv_transfer_params. They ride on the outputs of their own requests, so that nothing has to be matched
or waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from guard.mia.patching import wrap

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

OUTPUT_ATTRIBUTE = "mia_readouts"
"""Name under which a ModelRunnerOutput carries readouts from the worker to the scheduler's process."""


def attach(output: Any, readouts: dict[str, dict[str, Any]]) -> None:
    """Put what a step gave on its ModelRunnerOutput."""
    setattr(output, OUTPUT_ATTRIBUTE, readouts)


def install() -> None:
    wrap(Scheduler, "update_from_output", _update_from_output)


def _update_from_output(
    original: Any, scheduler: Scheduler, scheduled: SchedulerOutput, output: ModelRunnerOutput
) -> Any:
    """Move readouts from the worker's output onto the outputs of their requests."""
    by_client = original(scheduler, scheduled, output)
    readouts: dict[str, dict[str, Any]] | None = getattr(output, OUTPUT_ATTRIBUTE, None)
    if readouts:
        for outputs in by_client.values():
            for one in outputs.outputs:
                if (wire := readouts.get(one.request_id)) is not None:
                    one.kv_transfer_params = {**(one.kv_transfer_params or {}), "mia": wire}
    return by_client
