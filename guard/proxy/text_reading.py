"""Detectors that read texts, each as work of its own with a deadline of its own: none is late for another's sake.

Owns which of them is waited for: those that the live policy's rules in force go by. Of the others what has come counts
when the request has ended, and nobody waits for them meanwhile. Never decides anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from detectors.base import Score
from detectors.deadline import TooLateError
from guard.policy.judges import Wait
from guard.proxy.client_threads import TextThreads

LATE = Score("unavailable", reason="the text was not read in time", timed_out=True)
PENDING = Score("unavailable", reason="the text is still being read")


@dataclass(frozen=True)
class Reader:
    """One detector: ``work`` gives its score of each text, and is done in a thread."""

    work: Callable[[], Sequence[Score]]
    wait: Wait


@dataclass
class Reading:
    """``each``: of each text the scores by key, ``PENDING`` while nobody waits for them. ``late``: of each text what
    stands there when nothing came. ``again``: decides anew, for the record, when more has come."""

    each: list[dict[str, Score]]
    late: Sequence[Score] = ()
    again: Callable[[], None] = lambda: None
    _beside: dict[str, asyncio.Task[Sequence[Score]]] = field(default_factory=dict)
    _carried: dict[str, asyncio.Task[Sequence[Score]]] = field(default_factory=dict)

    @property
    def under_way(self) -> list[str]:
        """Keys of detectors that nobody waits for and that are still at it."""
        return [key for key, task in (*self._carried.items(), *self._beside.items()) if not task.done()]

    async def settle(self, limit_s: float) -> bool:
        """Take what comes within so many seconds; what does not is late. Whether there was anything to wait for."""
        if not self._beside:
            return False
        try:
            await asyncio.wait(self._beside.values(), timeout=limit_s)
        finally:
            self.stop()
            self.again()
        return True

    def take(self) -> None:
        """Put what has come to the scores."""
        for key, task in [*self._beside.items()]:
            if task.done():
                self._put(key, self.late if task.cancelled() or task.exception() else task.result())
                del self._beside[key]
        self._carried = {key: task for key, task in self._carried.items() if not task.done()}

    async def come(self, key: str, work: Awaitable[Sequence[Score]]) -> bool:
        """Wait for a detector's scores. Whether they came in time. Raises ``ApiError`` where it got no turn."""
        try:
            scores = await work
        except (TimeoutError, TooLateError):
            self._put(key, self.late)
            return False
        self._put(key, scores)
        return True

    def miss(self, key: str) -> None:
        """Nothing of a detector will come."""
        self._put(key, self.late)

    def begin(self, key: str, work: Coroutine[Any, Any, Sequence[Score]]) -> None:
        """Have a detector read that nobody waits for. What it raises makes it late."""
        task = self._beside[key] = asyncio.create_task(work)
        task.add_done_callback(_seen)

    def carry_on(self, earlier: Reading) -> None:
        """Count what an earlier reading, of other texts, still has under way as this one's."""
        self._carried = {**earlier._carried, **earlier._beside}
        for known in self.each:
            known.update(dict.fromkeys(self._carried, PENDING))

    def stop(self) -> None:
        """The same, and give up what has not."""
        self.take()
        for key, task in self._beside.items():
            task.cancel()
            self._put(key, self.late)
        for task in self._carried.values():
            task.cancel()
        self._beside.clear()
        self._carried.clear()

    def _put(self, key: str, scores: Sequence[Score]) -> None:
        for known, score in zip(self.each, scores, strict=True):
            known[key] = score


async def read_by_each(
    readers: Mapping[str, Reader], late: Sequence[Score], characters: int, threads: TextThreads
) -> Reading:
    """Scores by key of a detector, once those are there that a decision waits for, or late. ``late``: as in
    ``Reading``, one for each text; ``characters``: of all texts together. Raises ``ApiError``."""
    reading = Reading([dict.fromkeys(readers, PENDING) for _ in late], late)
    if len(readers) == 1 and (alone := next(iter(readers.items())))[1].wait.acts:
        # As most policies have it: no task of its own for it.
        await reading.come(alone[0], threads.read(characters, alone[1].work, alone[1].wait.limit_s, kind=alone[0]))
        return reading
    kinds = sum(one.wait.acts for one in readers.values())
    acting: dict[asyncio.Task[bool], str] = {}
    for key, one in readers.items():
        read = partial(threads.read, characters, one.work, one.wait.limit_s, kind=key)
        if one.wait.acts:
            task = asyncio.create_task(reading.come(key, read(kinds=kinds)))
            task.add_done_callback(_seen)
            acting[task] = key
        else:
            reading.begin(key, read(beside=True))
    waiting = set(acting)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any([not task.result() and readers[acting[task]].wait.ends for task in done]):
                # A rule blocks now, whatever the others would say.
                break
    except BaseException:
        reading.stop()
        raise
    finally:
        for task in waiting:
            task.cancel()
    for task in waiting:
        reading.miss(acting[task])
    reading.take()
    return reading


def _seen(task: asyncio.Task[Any]) -> None:
    """What it raises is for who looks at it, if anybody does."""
    if not task.cancelled():
        task.exception()
