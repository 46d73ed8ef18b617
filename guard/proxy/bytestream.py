"""Bytes of an answer that is still arriving, cut where its wire form says.

Owns the buffer. Whoever waits here may be cancelled and may ask again: no byte is lost, since bytes go from the
connection to the buffer in one step.
"""

from __future__ import annotations

from typing import Protocol

from guard.proxy.errors import UpstreamError, upstream_errors

MAX_PIECE_BYTES = 64 * 1024 * 1024
"""Longest line or frame; one with the readouts of many layers of a large model has a few megabytes."""


class Content(Protocol):
    """Where bytes come from: a connection of aiohttp's, or another provider's answer."""

    async def readany(self) -> bytes:
        """Wait for more bytes; none at the end."""
        ...


class ByteStream:
    def __init__(self, content: Content) -> None:
        self._content = content
        self._buffer = bytearray()
        self._ended = False

    async def line(self) -> bytes:
        """The next line without its end. Raises ``UpstreamError`` when the answer ends before."""
        while (end := self._buffer.find(b"\n")) < 0:
            if not await self._fill():
                raise UpstreamError("the model server's answer ended too early")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def frames(self) -> list[bytes]:
        """Whole server-sent events, each with its blank line, as many as are there; none at the end."""
        while (end := self._end_of_frames()) < 0:
            if not await self._fill():
                return []
        whole = bytes(self._buffer[: end + 2])
        del self._buffer[: end + 2]
        return [frame + b"\n\n" for frame in whole.split(b"\n\n")[:-1]]

    def _end_of_frames(self) -> int:
        """Where the last blank line is. Lines may end in CRLF, too; the JSON in them has no such character."""
        if b"\r\n" in self._buffer:
            self._buffer = self._buffer.replace(b"\r\n", b"\n")
        return self._buffer.rfind(b"\n\n")

    async def rest(self) -> bytes:
        """Everything up to the end."""
        while await self._fill(limited=False):
            pass
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    async def _fill(self, *, limited: bool = True) -> bool:
        """Wait for more bytes; False at the end."""
        if self._ended:
            return False
        if limited and len(self._buffer) > MAX_PIECE_BYTES:
            raise UpstreamError("the model server's answer cannot be read")
        with upstream_errors():
            chunk = await self._content.readany()
        self._ended = not chunk
        self._buffer += chunk
        return not self._ended
