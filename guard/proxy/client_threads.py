"""Threads for what clients' texts take: few enough that the process goes on meanwhile, and no client has all of them.

Owns whose turn it is, and that work which is not wanted any more ends. Nothing but clients' texts is worked on here,
and clients' texts nowhere else: whatever keeps the guard itself going never waits for them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, TypeVar

from detectors.deadline import Deadline, until

T = TypeVar("T")

SHORT_CHARACTERS = 64 * 1024
"""Texts up to this length together never wait for longer ones."""

SHORT_THREADS, LONG_THREADS, BODY_THREADS = 16, 2, 4
"""Python computes in one thread at a time: more of them for what takes long would only make everybody else slow. Some
detectors wait for something while they read, which costs a thread and no time of the processor's."""


@dataclass(frozen=True)
class _Job:
    client: str
    work: Callable[[], Any]
    done: Future[Any]


class Lane:
    """``count`` threads, of which one client has at most half, rounded up, as long as its work runs, wanted or not.
    Clients with work that waits take turns. Threads start when they are first needed."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count, self._share = name, count, (count + 1) // 2
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._threads = self._idle = 0
        self._closed = False
        self._changed = threading.Condition()

    async def run(self, client: str, work: Callable[[], T], limit_s: float | None = None) -> T:
        """What ``work`` returns, or raises. Raises ``TimeoutError`` after ``limit_s``: work that waits is then
        forgotten, and work that runs finds its deadline past (``detectors.deadline``)."""
        deadline = Deadline(inf if limit_s is None else time.monotonic() + limit_s)
        job = _Job(client, partial(_within, deadline, work), Future())
        with self._changed:
            self._waiting.setdefault(client, deque()).append(job)
            if not self._idle and self._threads < self._count:
                self._threads += 1
                # Not waited for at the process's end: somebody else's detector may hang in it.
                threading.Thread(target=self._take_turns, name=self._name, daemon=True).start()
            self._changed.notify()
        try:
            async with asyncio.timeout(limit_s):
                result: T = await asyncio.wrap_future(job.done)
                return result
        finally:
            # Whoever asked may be gone before the deadline.
            deadline.give_up()
            self._forget(job)

    def close(self) -> None:
        """Threads end, each after what it is at."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _forget(self, job: _Job) -> None:
        with self._changed:
            jobs = self._waiting.get(job.client, deque())
            if job in jobs:
                jobs.remove(job)
            if not jobs:
                self._waiting.pop(job.client, None)

    def _take_turns(self) -> None:
        while (job := self._next()) is not None:
            try:
                if job.done.set_running_or_notify_cancel():
                    _do(job)
            finally:
                with self._changed:
                    self._running -= Counter((job.client,))
                    self._changed.notify()
            # Not kept, with its texts, until the next one comes.
            del job

    def _next(self) -> _Job | None:
        """The next work, once there is any that may run; None when there will be none."""
        with self._changed:
            self._idle += 1
            try:
                while True:
                    if self._closed:
                        return None
                    for client in [*self._waiting]:
                        if self._running[client] < self._share:
                            return self._taken(client)
                    self._changed.wait()
            finally:
                self._idle -= 1

    def _taken(self, client: str) -> _Job:
        jobs = self._waiting.pop(client)
        job = jobs.popleft()
        if jobs:
            # Behind the others.
            self._waiting[client] = jobs
        self._running[client] += 1
        return job


def _within(deadline: Deadline, work: Callable[[], T]) -> T:
    with until(deadline):
        return work()


def _do(job: _Job) -> None:
    try:
        result = job.work()
    except BaseException as error:
        job.done.set_exception(error)
    else:
        job.done.set_result(result)


@dataclass(frozen=True)
class ClientThreads:
    """Three lanes, so that a body is parsed and a short text read whatever long texts there are."""

    bodies: Lane = field(default_factory=lambda: Lane("bodies", BODY_THREADS))
    short: Lane = field(default_factory=lambda: Lane("short-texts", SHORT_THREADS))
    long: Lane = field(default_factory=lambda: Lane("long-texts", LONG_THREADS))

    def of(self, client: str | None) -> TextThreads:
        """Those that one client may have. None: whoever asks without a key, all together."""
        return TextThreads(self, client or "")

    def close(self) -> None:
        for lane in (self.bodies, self.short, self.long):
            lane.close()


@dataclass(frozen=True)
class TextThreads:
    """``ClientThreads`` as one client has them."""

    threads: ClientThreads
    client: str

    async def read(self, characters: int, work: Callable[[], T], limit_s: float | None = None) -> T:
        """``work`` on texts of so many characters together; as ``Lane.run``."""
        lane = self.threads.short if characters <= SHORT_CHARACTERS else self.threads.long
        return await lane.run(self.client, work, limit_s)

    async def parse(self, work: Callable[[], T]) -> T:
        """``work`` on a body; as ``Lane.run``."""
        return await self.threads.bodies.run(self.client, work)
