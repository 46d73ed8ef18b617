"""What all worker processes tell of their requests, as one: the console's list, a request's page, recent scores.

Owns the order of the list, the cursor that says how far somebody has read it, and how long a process is waited for. One
that does not answer is named, and costs its own requests alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any

from guard.console import ended
from guard.console.ended import NOT_KEPT, Answer, Question, Source
from guard.proxy.errors import NotFoundError

ANSWER_S = 2.0
"""How long a process may take for what it has in memory."""

AGAIN_S = 2.0
"""While one does not answer, whoever waits for news hears after this time whether it is back."""

CURSOR = r"^([0-9a-f]{16}-[0-9]{1,15}(\.[0-9a-f]{16}-[0-9]{1,15})*)?$"
"""Of each process its run, and the number of its last request that was told of."""


@dataclass(frozen=True)
class Together:
    """``sources``: all processes, by their numbers."""

    sources: Sequence[Source]

    async def lines(self, cursor: str, wait_s: float) -> dict[str, Any]:
        """Requests after ``cursor``, which is of an answer before or empty, in the order in which they ended; waits for
        one for at most ``wait_s`` seconds. ``missing``: processes that did not answer."""
        seen = _read(cursor)
        told = await self._all(Question("lines", seen=seen))
        if wait_s > 0 and not any(one["lines"] for one in told.values()):
            await self._news(Question("news", seen=seen, wait_s=wait_s), told)
            told = await self._all(Question("lines", seen=seen))
        waiting = [[(one["ended_s"], answer["run"], one) for one in answer["lines"]] for answer in told.values()]
        # Each tells at most as many as are taken here, so that none is passed over for being told of later.
        taken = list(islice(merge(*waiting, key=lambda one: one[0]), ended.MAX_LINES))
        at = {answer["run"]: seen.get(answer["run"], 0) for answer in told.values()}
        at |= {run: one["number"] for _, run, one in taken}
        missing = self._missing(told)
        return {
            # One that does not answer now may go on later; one that has ended is never heard of again.
            "cursor": _written({**seen, **at} if missing else at),
            "more": len(taken) < sum(map(len, waiting)) or any(one["more"] for one in told.values()),
            "missing": missing,
            "requests": [one["line"] for _, _, one in taken],
        }

    async def one(self, question: Question) -> Answer:
        """The answer of the process that has this request."""
        has = await self._all(Question("has", request_id=question.request_id))
        for number, here in has.items():
            if here:
                try:
                    return await self.sources[number].answer(question)
                except (OSError, ValueError):
                    break  # it has just ended
        missing = self._missing(has)
        besides = f" (or worker {missing[0]} has it, which does not answer now)" if missing else ""
        return Answer(404, NotFoundError(NOT_KEPT + besides).to_wire())

    async def scores(self) -> dict[str, dict[str, Any]]:
        """As each process has them, added up."""
        sums: dict[str, dict[str, Any]] = {}
        for told in (await self._all(Question("scores"))).values():
            for kind, one in told.items():
                known = sums.get(kind, {"bins": [0] * len(one["bins"]), "requests": 0})
                bins = [a + b for a, b in zip(known["bins"], one["bins"], strict=True)]
                sums[kind] = {"bins": bins, "requests": known["requests"] + one["requests"]}
        return sums

    async def policies_error(self) -> str | None:
        """Why a process judges by policies of earlier; None where none does."""
        told = await self._all(Question("state"))
        return next((one["policies_error"] for one in told.values() if one["policies_error"]), None)

    async def _all(self, question: Question) -> dict[int, Any]:
        """What was answered, by number of those that did."""
        answers = await asyncio.gather(*(_asked(one, question) for one in self.sources))
        return {number: one.body for number, one in enumerate(answers) if one is not None and one.status == 200}

    def _missing(self, told: Mapping[int, Any]) -> list[int]:
        return [number for number in range(len(self.sources)) if number not in told]

    async def _news(self, question: Question, present: Mapping[int, Any]) -> None:
        """Until one of these has news, or ends."""
        limit_s = min(question.wait_s, AGAIN_S) if self._missing(present) else question.wait_s
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(asyncio.sleep(limit_s))]
        waiting += [asyncio.ensure_future(self.sources[number].answer(question)) for number in present]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def _asked(source: Source, question: Question) -> Answer | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await source.answer(question)
    except (OSError, ValueError):
        return None


def _read(cursor: str) -> dict[str, int]:
    """``cursor``: as ``CURSOR``."""
    parts = (one.partition("-") for one in cursor.split(".") if one)
    return {run: int(number) for run, _, number in parts}


def _written(at: Mapping[str, int]) -> str:
    return ".".join(f"{run}-{number}" for run, number in at.items())
