"""Threads for what clients' texts take: few enough that the process goes on meanwhile, and no client has all of them.

Owns whose turn it is, how long a turn is waited for, and that work which is not wanted any more ends. Nothing but
clients' texts is worked on here, and clients' texts nowhere else: whatever keeps the guard itself going never waits for
them. The time that a detector has begins when its work does: however much a client sends at once, that makes no text of
it a late one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from detectors.deadline import Deadline, until
from guard.proxy.errors import TextsWaitError, TooManyTextsError

T = TypeVar("T")

SHORT_CHARACTERS = 64 * 1024
"""Texts up to this length together never wait for longer ones."""

SHORT_THREADS, LONG_THREADS, BODY_THREADS, BESIDE_THREADS = 16, 2, 4, 4
"""Python computes in one thread at a time: more of them for what takes long would only make everybody else slow. Some
detectors wait for something while they read, which costs a thread and no time of the processor's."""

SHORT_WAITING, LONG_WAITING, BODIES_WAITING, BESIDE_WAITING = 1024, 64, 256, 64
"""Work of one client that may wait in a lane. Each has a text in memory."""

MAX_WAIT_S = 30.0
"""Longest wait for a turn."""

LOOK_S = 0.25
"""How often work that waits is looked after: what others are at may have become overdue."""


@dataclass(eq=False)
class _Job:
    """``kind``: of a client's work, which has ``most`` threads of its share, and ``shares`` that with other kinds.
    ``began_s``: on the clock of ``time.monotonic``, None while it waits."""

    client: str
    kind: str
    shares: bool
    most: int
    work: Callable[[], Any]
    limit_s: float
    deadline: Deadline = field(default_factory=Deadline)
    done: Future[Any] = field(default_factory=Future)
    began_s: float | None = None

    def begin(self) -> None:
        self.began_s = time.monotonic()
        self.deadline.moment_s = self.began_s + self.limit_s

    @property
    def left_s(self) -> float:
        return inf if self.began_s is None else self.began_s + self.limit_s - time.monotonic()


class Lane:
    """``count`` threads, of which one client has at most half, rounded up, as long as its work runs, wanted or not.
    Clients with work that waits take turns, and so do the kinds of one client's work: several share its half alike.

    Work that is overdue and does not end, as a detector that hangs, is counted apart: as many threads again take its
    place. ``waiting``: most work of one client that waits. Threads start when they are first needed.
    """

    def __init__(self, name: str, count: int, waiting: int) -> None:
        self._name, self._count, self._share, self._most_waiting = name, count, (count + 1) // 2, waiting
        self._waiting: dict[str, dict[str, deque[_Job]]] = {}
        self._running: list[_Job] = []
        self._threads = self._idle = 0
        self._closed = False
        self._changed = threading.Condition()

    async def run(
        self, client: str, work: Callable[[], T], limit_s: float | None = None, *, kind: str = "", kinds: int = 1
    ) -> T:
        """What ``work`` returns, or raises. Raises ``TimeoutError`` when it has taken ``limit_s``, or waited as long
        because all of its kind hang; work that runs then finds its deadline past (``detectors.deadline``).
        ``kind``: of the client's ``kinds``. Raises ``TooManyTextsError`` or ``TextsWaitError`` where it gets no
        turn."""
        most = self._share if kinds == 1 else (self._share + 1) // 2
        job = _Job(client, kind, kinds > 1, most, work, inf if limit_s is None else limit_s)
        with self._changed:
            mine = self._waiting.setdefault(client, {})
            if sum(map(len, mine.values())) >= self._most_waiting:
                raise TooManyTextsError("too many texts of this key wait to be read; send fewer at once")
            mine.setdefault(kind, deque()).append(job)
            self._hasten()
        result: asyncio.Future[T] = asyncio.wrap_future(job.done)
        try:
            return await self._come(job, result)
        finally:
            result.cancel()
            self._forget(job)
            # Whoever asked may be gone before the deadline.
            job.deadline.give_up()

    def close(self) -> None:
        """Threads end, each after what it is at."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def _come(self, job: _Job, result: asyncio.Future[T]) -> T:
        asked_s = time.monotonic()
        while True:
            wait_s = min(LOOK_S, job.limit_s) if job.began_s is None else job.left_s
            await asyncio.wait((result,), timeout=None if wait_s == inf else max(0.0, wait_s))
            if result.done():
                return result.result()
            if job.left_s <= 0:
                raise TimeoutError
            if job.began_s is None:
                waited_s = time.monotonic() - asked_s
                with self._changed:
                    self._hasten()
                    hangs = waited_s >= job.limit_s and self._hangs(job)
                if hangs:
                    raise TimeoutError
                if waited_s >= MAX_WAIT_S:
                    raise TextsWaitError(f"no text of this request could be read within {MAX_WAIT_S:g} s; try again")

    def _hasten(self) -> None:
        """Have a thread look for work."""
        if not self._idle and self._threads < min(2 * self._count, self._count + _overdue(self._running)):
            self._threads += 1
            # Not waited for at the process's end: somebody else's detector may hang in it.
            threading.Thread(target=self._take_turns, name=self._name, daemon=True).start()
        self._changed.notify()

    def _hangs(self, job: _Job) -> bool:
        """Whether all the threads that it might have are taken up by work of its own kind that is overdue."""
        alike = [one for one in self._running if one.kind == job.kind]
        mine = [one for one in alike if one.client == job.client]
        places = ((mine, 2 * job.most), (alike, 2 * self._count))
        return any(len(there) >= most and _overdue(there) == len(there) for there, most in places)

    def _forget(self, job: _Job) -> None:
        with self._changed:
            jobs = self._waiting.get(job.client, {}).get(job.kind, deque())
            if job in jobs:
                jobs.remove(job)
            self._drop_empty(job)

    def _drop_empty(self, job: _Job) -> None:
        kinds = self._waiting.get(job.client, {})
        if not kinds.get(job.kind):
            kinds.pop(job.kind, None)
        if not kinds:
            self._waiting.pop(job.client, None)

    def _take_turns(self) -> None:
        while (job := self._next()) is not None:
            try:
                if job.done.set_running_or_notify_cancel():
                    _do(job)
            finally:
                with self._changed:
                    self._running.remove(job)
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
                    for kinds in [*self._waiting.values()]:
                        for jobs in kinds.values():
                            if self._may_run(jobs[0]):
                                return self._taken(jobs[0])
                    self._changed.wait()
            finally:
                self._idle -= 1

    def _may_run(self, job: _Job) -> bool:
        mine = [one for one in self._running if one.client == job.client]
        alike = [one for one in mine if one.kind == job.kind]
        # Threads beyond the lane's number are for what overdue work keeps from running.
        # One kind that hangs leaves the others a thread.
        most_mine = max(2 * self._share, 2 * job.most + job.shares)
        places = (
            (alike, job.most, 2 * job.most),
            (mine, self._share, most_mine),
            (self._running, self._count, 2 * self._count),
        )
        return all(len(there) < min(most, usual + _overdue(there)) for there, usual, most in places)

    def _taken(self, job: _Job) -> _Job:
        kinds = self._waiting.pop(job.client)
        jobs = kinds.pop(job.kind)
        jobs.popleft()
        # Behind the others, of the same client's and of all.
        kinds[job.kind] = jobs
        self._waiting[job.client] = kinds
        self._drop_empty(job)
        job.begin()
        self._running.append(job)
        return job


def _overdue(jobs: Collection[_Job]) -> int:
    return sum(job.left_s <= 0 for job in jobs)


def _do(job: _Job) -> None:
    try:
        with until(job.deadline):
            result = job.work()
    except BaseException as error:
        job.done.set_exception(error)
    else:
        job.done.set_result(result)


@dataclass(frozen=True)
class ClientThreads:
    """Lanes of their own, so that a body is parsed and a short text read whatever long texts there are, and all of it
    whatever detectors read that nothing waits for (``beside``)."""

    bodies: Lane = field(default_factory=lambda: Lane("bodies", BODY_THREADS, BODIES_WAITING))
    short: Lane = field(default_factory=lambda: Lane("short-texts", SHORT_THREADS, SHORT_WAITING))
    long: Lane = field(default_factory=lambda: Lane("long-texts", LONG_THREADS, LONG_WAITING))
    beside: Lane = field(default_factory=lambda: Lane("texts-beside", BESIDE_THREADS, BESIDE_WAITING))

    def of(self, client: str | None) -> TextThreads:
        """Those that one client may have. None: whoever asks without a key, all together."""
        return TextThreads(self, client or "")

    def close(self) -> None:
        for lane in (self.bodies, self.short, self.long, self.beside):
            lane.close()


@dataclass(frozen=True)
class TextThreads:
    """``ClientThreads`` as one client has them."""

    threads: ClientThreads
    client: str

    async def read(
        self,
        characters: int,
        work: Callable[[], T],
        limit_s: float,
        *,
        kind: str = "",
        kinds: int = 1,
        beside: bool = False,
    ) -> T:
        """``work`` on texts of so many characters together; as ``Lane.run``. ``beside``: nothing waits for it."""
        lane = self.threads.short if characters <= SHORT_CHARACTERS else self.threads.long
        if beside:
            lane = self.threads.beside
        return await lane.run(self.client, work, limit_s, kind=kind, kinds=kinds)

    async def parse(self, work: Callable[[], T]) -> T:
        """``work`` on a body; as ``Lane.run``."""
        return await self.threads.bodies.run(self.client, work)
