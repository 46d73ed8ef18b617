"""Messages of steps on their way from the worker to the front ends, whatever the runner.

Relies on (vLLM 0.29): ModelRunnerOutput being a plain dataclass, Scheduler.{update_from_output, finish_requests,
requests}, Request.client_index, update_from_output's result by client, EngineCoreOutput.{request_id, finish_reason,
kv_transfer_params}. They ride on the outputs of requests that ask, so that nothing has to be matched or waited for: a
request's own step is never behind its output.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from guard.mia.patching import wrap
from guard.mia.record import Message

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

MESSAGE_ATTRIBUTE = "mia_message"
"""Name under which a ModelRunnerOutput carries a step's message from the worker to the scheduler's process."""

OUTBOX_ATTRIBUTE = "mia_outbox"
"""Name under which a scheduler keeps its outbox, from the first message on."""

Post = tuple[bytes | None, bytes]
"""A layout, where it is new, and a body."""


@dataclass
class Outbox:
    """What waits for an output to ride on, by client. ``clients``: of the requests of the last layout; ``asking``: of
    any layout, as long as they live."""

    clients: frozenset[int] = frozenset()
    asking: set[str] = field(default_factory=set)
    waiting: dict[int, list[Post]] = field(default_factory=lambda: defaultdict(list))

    def put(self, message: Message, requests: dict[str, Any]) -> None:
        """``requests``: those that have not ended; some may have since the step began."""
        if message.request_ids is not None:
            alive = [request_id for request_id in message.request_ids if request_id in requests]
            self.clients = frozenset(requests[request_id].client_index for request_id in alive)
            self.asking.update(alive)
        # Of a layout all of whose requests have ended: whoever comes next has not seen it.
        for client in self.clients if self.asking else ():
            self.waiting[client].append((message.layout, message.body))

    def load(self, client: int, outputs: list[Any]) -> None:
        """Give what waits for a client to the first output of one that asks."""
        if not self.waiting.get(client):
            return
        carrier = next((one for one in outputs if one.request_id in self.asking), None)
        if carrier is not None:
            posts = self.waiting.pop(client)
            carrier.kv_transfer_params = {**(carrier.kv_transfer_params or {}), "mia": posts}

    def forget(self, request_ids: set[str]) -> None:
        self.asking -= request_ids
        if not self.asking:
            self.waiting.clear()


def attach(output: Any, message: Message) -> None:
    """Put what a step has read on its ModelRunnerOutput."""
    setattr(output, MESSAGE_ATTRIBUTE, message)


def install() -> None:
    wrap(Scheduler, "update_from_output", _update_from_output)
    wrap(Scheduler, "finish_requests", _finish_requests)


def _update_from_output(
    original: Any, scheduler: Scheduler, scheduled: SchedulerOutput, output: ModelRunnerOutput
) -> Any:
    message: Message | None = getattr(output, MESSAGE_ATTRIBUTE, None)
    outbox: Outbox | None = getattr(scheduler, OUTBOX_ATTRIBUTE, None)
    if message is not None:
        if outbox is None:
            outbox = Outbox()
            setattr(scheduler, OUTBOX_ATTRIBUTE, outbox)
        outbox.put(message, scheduler.requests)
    by_client = original(scheduler, scheduled, output)
    if outbox is not None and outbox.asking:
        for client, outputs in by_client.items():
            outbox.load(client, outputs.outputs)
            outbox.forget({one.request_id for one in outputs.outputs if one.finish_reason is not None})
    return by_client


def _finish_requests(original: Any, scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    """Requests that end without an output, because their client has left."""
    result = original(scheduler, *args, **kwargs)
    outbox: Outbox | None = getattr(scheduler, OUTBOX_ATTRIBUTE, None)
    if outbox is not None:
        outbox.forget({request_id for request_id in outbox.asking if request_id not in scheduler.requests})
    return result
