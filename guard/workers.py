"""Several proxy processes behind one port: started together, watched, started again, and stopped together.

Owns the processes and how they are told to stop. Each is a whole proxy that takes connections from the same socket; the
first also has the admin API, and asks the others for what its console shows. They share nothing else but files and
Redis: each looks at policies and keys by itself, and so comes to the same ones within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from guard.console.peers import Seat
from guard.owned_folder import METRICS, owned_folder
from guard.policy import PolicyError
from guard.proxy.keys import KeysError
from guard.proxy.loops import Hops
from guard.proxy.services import Services
from guard.proxy_process import Ports, checked_services, proxy_running
from guard.proxy_server import StartError
from guard.settings import Settings, SettingsError
from guard.supervisor import backoff
from guard.telemetry.ledger import LedgerError
from guard.telemetry.metrics import SHARED_FOLDER
from guard.telemetry.shared_series import fold

log = logging.getLogger("guard.workers")

READY = b"ready"
STOP_GRACE_S = 10.0
"""Beyond what draining may take."""

SPAWN = multiprocessing.get_context("spawn")
"""No fork: a child would begin with this process' locks, sockets and event loop."""

Say = Callable[[str], None]


class Worker:
    """One process, and the pipe to it: it says when it is ready, and stops when this end is closed, however that comes
    about. ``seat``: in the folder of all workers, which has their series as well."""

    def __init__(self, settings: Settings, ports: Ports, seat: Seat) -> None:
        self._link, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(
            target=_work, args=(settings, ports.of_worker(seat.number), theirs, seat), name="guard-proxy"
        )
        with _variable(SHARED_FOLDER, str(seat.folder)):
            self.process.start()
        theirs.close()

    async def wait_ready(self) -> bool:
        """False: it ended instead, and has said why."""
        await _readable(self._link.fileno())
        try:
            return self._link.recv_bytes() == READY
        except (EOFError, ConnectionResetError):
            return False

    async def wait_ended(self) -> None:
        await _readable(self.process.sentinel)
        self.process.join()

    def tell_to_stop(self) -> None:
        self._link.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.asynccontextmanager
async def proxies(services: Services, ports: Ports, say: Say) -> AsyncIterator[asyncio.Task[None]]:
    """The proxy, ready: in this process, or in as many as ``workers`` says. The task ends when nothing serves any more.

    services: of this process; with workers they have only shown that a start makes sense. Raises ``StartError``.
    """
    settings = services.settings
    if settings.workers == 1:
        async with proxy_running(services, ports) as server:
            yield server
        return
    with owned_folder(METRICS) as metrics:
        async with _running(settings, ports, metrics, say) as watching:
            yield watching


@contextlib.asynccontextmanager
async def _running(settings: Settings, ports: Ports, metrics: str, say: Say) -> AsyncIterator[asyncio.Task[None]]:
    share = _share(settings)
    seats = [Seat(number, settings.workers, Path(metrics)) for number in range(settings.workers)]
    workers = [Worker(share, ports, seat) for seat in seats]
    try:
        if not all(await asyncio.gather(*(worker.wait_ready() for worker in workers))):
            raise StartError("a worker process did not start; the lines above say why")

        ended: set[int] = set()

        def again(number: int) -> Worker:
            ended.add(workers[number].process.pid or 0)
            _fold(ended, metrics)
            return Worker(share, ports, seats[number])

        watching = asyncio.create_task(_watch(workers, again, say))
        try:
            yield watching
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    finally:
        # Whoever comes when all workers have closed theirs is refused, and does not wait for this process to end.
        ports.close()
        for worker in workers:
            worker.tell_to_stop()
        limit_s = settings.drain_delay_s + settings.drain_timeout_s + STOP_GRACE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*(worker.wait_ended() for worker in workers))
        for worker in workers:
            worker.kill()


def _share(settings: Settings) -> Settings:
    """What one worker is set up with: its part of what is counted in each process."""
    return settings.model_copy(update={"max_concurrent": max(1, settings.max_concurrent // settings.workers)})


async def _watch(workers: list[Worker], again: Callable[[int], Worker], say: Say) -> None:
    """Start again, in its place, each worker that ends; cancel it."""

    async def keep(number: int) -> None:
        delays_s = backoff()
        while True:
            await workers[number].wait_ended()
            code = workers[number].process.exitcode
            delay_s = next(delays_s)
            say(f"worker {number} ended with exit code {code}; starting it again in {delay_s:.0f} s")
            workers[number].tell_to_stop()
            await asyncio.sleep(delay_s)
            workers[number] = again(number)
            if await workers[number].wait_ready():
                say(f"worker {number} is back")
                delays_s = backoff()

    async with asyncio.TaskGroup() as group:
        for number in range(len(workers)):
            group.create_task(keep(number))


def _fold(ended: set[int], metrics: str) -> None:
    """What dead processes had under way is under way no more; what they counted stays counted. Emptied once it is."""
    try:
        fold(Path(metrics), ended)
        ended.clear()
    except OSError as error:
        log.error("what ended workers counted stays in files of their own: %s", error.strerror)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """In the environment of processes that the block starts, and of no other: vLLM has a use for this one too."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


async def _readable(descriptor: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _work(settings: Settings, ports: Ports, link: Connection, seat: Seat) -> None:
    """The process. Ctrl-C is for the parent, which reads it too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def serve() -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, told.set)
        async with proxy_running(checked_services(settings, Hops(seat.hop)), ports, seat) as server:
            link.send_bytes(READY)
            # Nothing is ever sent: it is readable when the parent has closed its end, or is gone.
            ends = [asyncio.create_task(one) for one in (told.wait(), _readable(link.fileno()))]
            await asyncio.wait([*ends, server], return_when=asyncio.FIRST_COMPLETED)
            for one in ends:
                one.cancel()

    try:
        uvloop.run(serve())
    except (StartError, PolicyError, SettingsError, KeysError, LedgerError) as error:
        print(f"guard: {error}", file=sys.stderr)
        sys.exit(1)
