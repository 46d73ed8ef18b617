"""One front end's readouts under way: messages of all its engines in, readouts by request out.

Owns which request belongs to which engine's assembler, and that what has ended leaves nothing behind. Never touches
vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable

from guard.mia.assembly import Assembler, Waiting
from guard.mia.record import RecordReader
from guard.mia.results import Readout, SteeringReport, empty
from guard.mia.spec import generates


class Inbox:
    def __init__(self) -> None:
        self._reader = RecordReader()
        self._assemblers: dict[str, Assembler] = {}
        self.waiting: dict[str, Waiting] = {}
        self.step_ended_at_s = 0.0
        """Of the step whose record came last, in seconds since 1970 by the worker's clock."""

    def add(self, request_id: str, waiting: Waiting) -> None:
        self.waiting[request_id] = waiting

    def receive(self, posts: Iterable[tuple[bytes | None, bytes]]) -> None:
        """Layouts, where they are new, and bodies, in the order of the steps of one engine."""
        for layout, body in posts:
            ring, record = self._reader.read(layout, body)
            if (assembler := self._assemblers.get(ring.path)) is None:
                assembler = self._assemblers[ring.path] = Assembler(ring)
            assembler.take(record, self.waiting)
            self.step_ended_at_s = record.ended_at_s

    @property
    def has_news(self) -> bool:
        """Whether a prompt's readouts may be there, or progress: most steps of most answers bring neither."""
        return any(assembler.has_news for assembler in self._assemblers.values())

    def prompt(self, request_id: str) -> dict[str, Readout] | None:
        """The readouts of a prompt, once, as soon as they are all there."""
        assembler = self._assembler_of(request_id)
        return None if assembler is None else assembler.prompt(request_id)

    def progress(self, request_id: str) -> dict[str, Readout] | None:
        """What has grown with an answer since this was last not None, if its request wants to see that now."""
        assembler = self._assembler_of(request_id)
        return None if assembler is None else assembler.progress(request_id)

    def end(self, request_id: str) -> tuple[dict[str, Readout], tuple[SteeringReport, ...]]:
        """What has grown with an answer that has ended, and what steering did. The request is forgotten."""
        asked = self.waiting[request_id].asked
        if (assembler := self._assembler_of(request_id)) is not None:
            items, steering = assembler.end(request_id)
        else:
            grown = {name: capture for name, capture in asked.spec.captures.items() if generates(capture)}
            items, steering = {name: empty(capture, asked.hidden_size) for name, capture in grown.items()}, ()
        self.forget([request_id])
        return items, steering

    def forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.waiting[request_id]
        for assembler in self._assemblers.values():
            assembler.forget(request_ids)

    def _assembler_of(self, request_id: str) -> Assembler | None:
        return next((one for one in self._assemblers.values() if request_id in one.requests), None)
