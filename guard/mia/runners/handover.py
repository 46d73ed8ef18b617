"""Readouts on their way from the worker to the API server, whatever the runner.

Relies on (vLLM 0.29): ModelRunnerOutput being a plain dataclass, Scheduler.{update_from_output, finish_requests,
requests}, EngineCoreOutput.{kv_transfer_params, finish_reason}. They ride on the outputs of their own requests, so that
nothing has to be matched or waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from guard.mia.assembly import Assembler
from guard.mia.patching import wrap
from guard.mia.record import StepRecord

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

RECORD_ATTRIBUTE = "mia_record"
"""Name under which a ModelRunnerOutput carries a step's record from the worker to the scheduler's process."""

ASSEMBLER_ATTRIBUTE = "mia_assembler"
"""Name under which a scheduler keeps its assembler, from the first record on."""


def attach(output: Any, record: StepRecord) -> None:
    """Put what a step has read on its ModelRunnerOutput."""
    setattr(output, RECORD_ATTRIBUTE, record)


def install() -> None:
    wrap(Scheduler, "update_from_output", _update_from_output)
    wrap(Scheduler, "finish_requests", _finish_requests)


def _update_from_output(
    original: Any, scheduler: Scheduler, scheduled: SchedulerOutput, output: ModelRunnerOutput
) -> Any:
    """Put what there is to send onto the outputs of its requests."""
    record: StepRecord | None = getattr(output, RECORD_ATTRIBUTE, None)
    assembler: Assembler | None = getattr(scheduler, ASSEMBLER_ATTRIBUTE, None)
    if record is not None:
        if assembler is None:
            assembler = Assembler()
            setattr(scheduler, ASSEMBLER_ATTRIBUTE, assembler)
        assembler.take(record, scheduler.requests)
    by_client = original(scheduler, scheduled, output)
    if assembler is not None and assembler.requests:
        for outputs in by_client.values():
            for one in outputs.outputs:
                ended = one.finish_reason is not None
                if ended or assembler.is_due(one.request_id):
                    _hand_over(assembler, one, ended)
    return by_client


def _hand_over(assembler: Assembler, output: Any, ended: bool) -> None:
    reading = assembler.reading(output.request_id, ended=ended)
    if reading is not None:
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), "mia": reading.to_wire()}
    if ended:
        assembler.forget([output.request_id])


def _finish_requests(original: Any, scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    """Requests that end without an output, because their client has left."""
    result = original(scheduler, *args, **kwargs)
    assembler: Assembler | None = getattr(scheduler, ASSEMBLER_ATTRIBUTE, None)
    if assembler is not None:
        assembler.forget([request_id for request_id in assembler.requests if request_id not in scheduler.requests])
    return result
