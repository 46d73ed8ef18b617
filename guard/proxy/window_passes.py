"""Detectors with windows have the model read a long prompt's data once more, window by window.

Owns these passes: what each asks, how many are under way at once, that detectors share one which asks the same, and
that none outlives its request. Each costs the engine the reading of one short prompt, and one token. What comes of them
goes to the question that the request's own readouts answer. Never decides anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache

from detectors.base import Score
from detectors.windows import MORE, pass_messages, placed
from guard.mia.results import Readouts
from guard.mia.spec import MiaSpec
from guard.policy import Judges, Question
from guard.policy.measuring import Measurement, Part, Passes, Windowed, question
from guard.proxy.second_pass import ID_SUFFIX, PassReader, SecondPassError
from guard.telemetry.record import RequestRecord

AT_ONCE = 16
"""Passes of one request that are under way at the same time."""

LATE = Score("unavailable", reason="not all windows were read in time", timed_out=True)

Asked = tuple[str, str]
"""An instruction and a window."""


@dataclass
class WindowPasses:
    """Those of one request, begun. ``passes``: by key of each detector, what it has read."""

    measured: Mapping[str, Measurement]
    passes: Mapping[str, Passes]
    tasks: Mapping[Asked, asyncio.Task[Readouts | Score]]
    began_s: float = field(default_factory=time.perf_counter)

    async def answered(self, asked: Question, limit_s: float, record: RequestRecord) -> Question:
        """The question with what came of the windows within ``limit_s``. 0: with what is there already."""
        if self.tasks:
            await asyncio.wait(self.tasks.values(), timeout=limit_s)
            record.window_passes = len(self.tasks)
            record.window_passes_s = time.perf_counter() - self.began_s
        return replace(asked, windows={key: self._scores(key, of_one) for key, of_one in self.passes.items()})

    def _scores(self, key: str, passes: Passes) -> Windowed:
        scores = [
            placed(self._score(self.measured[key], self.tasks[passes.instruction, text]), *place, window)
            for text, place, window in passes.windows
        ]
        return scores, MORE if passes.more else None

    def _score(self, one: Measurement, task: asyncio.Task[Readouts | Score]) -> Score:
        if not task.done():
            return LATE
        read = task.result()
        return read if isinstance(read, Score) else one.in_pass.score(read)


@asynccontextmanager
async def window_passes(
    judges: Judges, asked: Question, parts: Sequence[Part], roles: Sequence[str], reader: PassReader
) -> AsyncIterator[WindowPasses | None]:
    """Begun when entered; left, what is still under way is given up. None where no detector has windows."""
    measured = {one.key: one for one in judges.windowed if one.key not in asked.known}
    if not measured:
        yield None
        return
    passes = {key: one.passes(parts, roles) for key, one in measured.items()}
    wanted: dict[Asked, list[str]] = {}
    for key, of_one in passes.items():
        for text, _, _ in of_one.windows:
            wanted.setdefault((of_one.instruction, text), []).append(key)
    turn = asyncio.Semaphore(AT_ONCE)

    @cache
    def spec_of(keys: tuple[str, ...], roles: tuple[str, ...]) -> MiaSpec:
        return question([measured[key].in_pass for key in keys], roles).spec

    async def read(number: int, what: Asked, keys: Sequence[str]) -> Readouts | Score:
        messages = pass_messages(*what)
        spec = spec_of(tuple(keys), tuple(message["role"] for message in messages))
        async with turn:
            try:
                return await reader.read(messages, spec, f"{ID_SUFFIX}-{number}")
            except SecondPassError as error:
                return Score("unavailable", reason=str(error))

    tasks = {
        what: asyncio.create_task(read(number, what, keys)) for number, (what, keys) in enumerate(wanted.items(), 1)
    }
    try:
        yield WindowPasses(measured, passes, tasks)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
