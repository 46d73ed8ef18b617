"""The requests that ended last, in memory, for those who look on: the console.

Owns how many are kept and waiting for the next one. Of this process alone, gone with it; what is to last is in the
ledger. Holds no text of a prompt or an answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from heapq import merge

from guard.policy import Judges
from guard.telemetry.record import RequestRecord


@dataclass(frozen=True)
class Finished:
    """``number``: counts up from 1, in the order in which requests ended. ``judges``: as they were for this request,
    whatever was reloaded since; None where it did not come to them."""

    number: int
    record: RequestRecord
    judges: Judges | None

    @property
    def ended_s(self) -> float:
        """When, in seconds since 1970: requests of other processes compare."""
        return self.record.started_at.timestamp() + (self.record.total_s or 0.0)


class Recent:
    """At most ``judged`` that a policy judged, ``passed`` that were answered without one, and ``failed`` others. A kind
    pushes out no other one: of lists of models and of refusals there may be many."""

    def __init__(self, judged: int, passed: int, failed: int) -> None:
        self._judged: deque[Finished] = deque(maxlen=judged)
        self._passed: deque[Finished] = deque(maxlen=passed)
        self._failed: deque[Finished] = deque(maxlen=failed)
        self._number = 0
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, record: RequestRecord, judges: Judges | None) -> Finished:
        self._number += 1
        finished = Finished(self._number, record, judges)
        unjudged = self._passed if record.outcome == "completed" else self._failed
        (self._judged if judges is not None else unjudged).append(finished)
        self._wake()
        return finished

    def after(self, number: int) -> list[Finished]:
        """Those with a higher number, as far as they are kept, the oldest first."""
        kept = merge(self._judged, self._passed, self._failed, key=_number)
        return [one for one in kept if one.number > number]

    def get(self, request_id: str) -> Finished | None:
        """None when it is not kept any more, or was never there."""
        kept = (one for kind in (self._judged, self._passed, self._failed) for one in kind)
        return next((one for one in kept if one.record.request_id == request_id), None)

    async def wait(self, number: int, limit_s: float) -> None:
        """Until there is one after ``number``, for at most ``limit_s`` seconds; not at all once it is closed."""
        try:
            async with asyncio.timeout(limit_s):
                while self._number <= number and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """Nobody waits any more: the process stops."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # A new event, since whoever waited for the old one must not wait for one that stays set.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _number(finished: Finished) -> int:
    return finished.number
