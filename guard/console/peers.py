"""One worker process asks another about the requests that ended there, over a socket in the folder that they share.

Owns these sockets and what is said there: one question and one answer on a connection, each a line of JSON. Nobody but
their user can enter the folder, so no key is asked for; and nothing but JSON is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

from guard.console.ended import Answer, Ended, Question
from guard.proxy.loops import named

log = logging.getLogger("guard.console")

MAX_ANSWER_BYTES = 64 << 20
"""A look inside the longest text has a fraction of it."""


@dataclass(frozen=True)
class Seat:
    """The place of one of ``of`` worker processes; the first has the console. ``folder``: theirs, which only their user
    can enter."""

    number: int
    of: int
    folder: Path

    @property
    def hop(self) -> str:
        """What all of them are called in ``Via``: their folder is theirs alone, and its name random."""
        return named(hashlib.sha256(str(self.folder).encode()).hexdigest()[:16])

    @property
    def socket(self) -> Path:
        return self.folder / f"worker-{self.number}.sock"

    @property
    def others(self) -> list[Peer]:
        """Those behind this one, in the order of their numbers."""
        return [Peer(Seat(number, self.of, self.folder).socket) for number in range(self.number + 1, self.of)]


@dataclass(frozen=True)
class Peer:
    """Another process, asked through its socket. It need not be there."""

    socket: Path

    async def answer(self, question: Question) -> Answer:
        """As ``Source``. Who gives up waiting for it ends the work as well."""
        reader, writer = await asyncio.open_unix_connection(self.socket, limit=MAX_ANSWER_BYTES)
        try:
            writer.write(_line(asdict(question)))
            told = json.loads(await reader.readline())
            return Answer(told["status"], told["body"])
        except (LookupError, TypeError) as error:
            raise ValueError("no answer in this form") from error
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def telling(ended: Ended, socket: Path) -> AsyncIterator[None]:
    """Answer whoever can reach ``socket``, which is made here, while the block takes."""
    asked: set[asyncio.Task[None]] = set()

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        asked.add(task)
        try:
            await _answered(ended, reader, writer)
        except Exception as error:
            log.error("what the console asked this worker failed: %s", type(error).__name__)
        finally:
            asked.discard(task)
            writer.close()

    try:
        server = await asyncio.start_unix_server(answer, socket)
    except OSError as error:
        # Its requests are guarded all the same; the console says that this worker does not answer.
        log.error("the console cannot show this worker's requests: %s: %s", socket, error.strerror or error)
        yield
        return
    try:
        yield
    finally:
        server.close()
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def _answered(ended: Ended, reader: StreamReader, writer: StreamWriter) -> None:
    """One question. Who asked says nothing more: what can be read then is that it has left."""
    work = asyncio.ensure_future(ended.answer(Question(**json.loads(await reader.readline()))))
    left = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            writer.write(await asyncio.to_thread(_line, asdict(work.result())))
            await writer.drain()
    finally:
        work.cancel()
        left.cancel()
        await asyncio.gather(work, left, return_exceptions=True)


def _line(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"
