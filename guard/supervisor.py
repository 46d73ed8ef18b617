"""Keeps one engine running: starts it, and when it dies starts it again, waiting longer after each failure.

Owns when an engine starts and ends. While there is none the proxy answers 502 or 503; nothing here serves requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from guard.engine_process import EngineCommand, EngineError, EngineProcess, previous_log

START_LIMIT_S = 1800.0
"""A large model may first be downloaded; an engine that is silent for longer is given up."""
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0

Say = Callable[[str], None]
Tick = Callable[[float], None]


class Supervisor:
    """The engine now running. ``process`` changes with every restart. ``ticks``: makes what is told of the time that a
    start takes, anew for each start."""

    def __init__(self, command: EngineCommand, say: Say, ticks: Callable[[], Tick]) -> None:
        self.command = command
        self._say = say
        self._ticks = ticks
        self.process = EngineProcess(command)

    async def keep_running(self) -> None:
        """Never returns; cancel it. A start that fails counts like a death and is tried again."""
        delays_s = backoff()
        while True:
            await self.process.wait_ended()
            self._say(self.process.obituary())
            await self.process.stop()
            delay_s = next(delays_s)
            kept = previous_log(self.command.log_file)
            self._say(f"starting the engine again in {delay_s:.0f} s; the log is then kept as {kept}")
            await asyncio.sleep(delay_s)
            self.process = EngineProcess(self.command)
            try:
                taken_s = await self.process.wait_healthy(START_LIMIT_S, self._ticks())
            except EngineError:
                continue
            self._say(f"the engine is back after {taken_s:.0f} s")
            delays_s = backoff()


def backoff() -> Iterator[float]:
    """Seconds to wait before the first, second, ... attempt: doubling up to ``LONGEST_DELAY_S``, without end."""
    delay_s = FIRST_DELAY_S
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


@contextlib.asynccontextmanager
async def running_engine(command: EngineCommand, say: Say, ticks: Callable[[], Tick]) -> AsyncIterator[Supervisor]:
    """A healthy engine that is kept running inside the block. Raises ``EngineError`` when the first start fails."""
    supervisor = Supervisor(command, say, ticks)
    keeper: asyncio.Task[None] | None = None
    try:
        await supervisor.process.wait_healthy(START_LIMIT_S, ticks())
        keeper = asyncio.create_task(supervisor.keep_running())
        yield supervisor
    finally:
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        await supervisor.process.stop()
