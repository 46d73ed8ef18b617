"""A server that answers every request with the bytes that it is told, whatever they are."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Raw:
    """``answer``: head and body, as they are on the wire; behind it the connection ``stays``. ``gone``: how often
    nothing comes first. ``heads``: of what was asked."""

    url: str = ""
    answer: bytes = b""
    stays: bool = False
    gone: int = 0
    heads: list[str] = field(default_factory=list)
    open: int = 0

    @property
    def paths(self) -> list[str]:
        return [head.split()[1] for head in self.heads]

    def says(self, status: int | str, body: bytes, media_type: str = "application/json", head: str = "") -> None:
        """``status``: with or without its word. ``head``: more lines, each with its end."""
        line = f"HTTP/1.1 {status} X\r\n" if isinstance(status, int) else f"{status}\r\n"
        told = f"{line}content-type: {media_type}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{head}\r\n"
        self.answer = told.encode() + body

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            self.heads.append(head.decode())
            if self.gone:
                self.gone -= 1
                return
            writer.write(self.answer)
            await writer.drain()
            if self.stays:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def raw_server() -> AsyncIterator[Raw]:
    raw = Raw()
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield raw
