"""HTTP/1.1 as the proxy's server reads it: uvicorn's, with bounds on what nobody has asked a key for yet.

Owns the bounds on a request's head, and what is refused before there is a request. What a body's end may bring along
(trailers) is counted and dropped: it could otherwise say something else than the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from guard.proxy.errors import HeadTooLargeError, InvalidRequestError
from guard.telemetry.record import Malformed

MAX_HEAD_BYTES = 64 * 1024
"""Most of a request line and its headers together."""

MAX_HEADERS = 128

LINGER_S = 1.0
"""How long what a refused client still sends is thrown away. Closed sooner, the kernel would answer it with a reset,
and the client might never see why."""


TOO_LARGE = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"
TOO_MANY = f"there are more than {MAX_HEADERS} headers"
ONCE = (b"host", b"authorization", b"x-api-key", b"content-type")
"""Headers that say who asks, whom, and for what. Of two of them, whoever stands before the proxy may read the other."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``_unread_bytes``: that came since the parser last had something to give; ``_head_bytes``: of the
    head, or trailers, under way, as the parser gave them. ``on_malformed``: called for each that is refused here."""

    _unread_bytes = 0
    _head_bytes = 0
    _headers_seen = 0
    _in_head = True
    _refusal: InvalidRequestError | None = None
    _refused = False

    def __init__(self, *server: Any, on_malformed: Callable[[Malformed], None], **servers: Any) -> None:
        super().__init__(*server, **servers)
        self._on_malformed = on_malformed

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        # The parser keeps a header to itself until its end.
        if self._unread_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refusal = HeadTooLargeError(TOO_LARGE)
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head_bytes = self._headers_seen = 0
        self._in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_seen += 1
        self._count(len(name) + len(value))
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unread_bytes, self._in_head = 0, False
        names = [name for name, _ in self.headers]
        for once in ONCE:
            if names.count(once) > 1:
                self._refuse(InvalidRequestError(f"there is more than one {once.decode()} header"))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def _count(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLargeError(TOO_LARGE))
        if self._headers_seen > MAX_HEADERS:
            self._refuse(HeadTooLargeError(TOO_MANY))

    def _refuse(self, refusal: InvalidRequestError) -> None:
        """Inside of the parser's callbacks: it stops, and says that the request is invalid."""
        self._refusal = refusal
        raise refusal

    def send_400_response(self, msg: str) -> None:
        """Instead of uvicorn's text: an error as all others are, with its own status."""
        refusal = self._refusal or InvalidRequestError(msg)
        self._refused = True
        self._on_malformed(_kind(self._refusal))
        body = refusal.to_json()
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[refusal.status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _kind(refusal: InvalidRequestError | None) -> Malformed:
    """``refusal``: ours; without it the parser could not go on."""
    if refusal is None:
        return "not_http"
    return "head_too_large" if isinstance(refusal, HeadTooLargeError) else "repeated_header"
