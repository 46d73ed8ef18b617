"""The proxy's HTTP server: its port, taken early, and uvicorn as a task that ends when its block is left.

Owns sockets, TLS, the order of stopping, and uvicorn's settings. What it serves is any ASGI application; signals are
the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from guard.folded_log import folded
from guard.proxy_protocol import BoundedProtocol
from guard.telemetry.record import Malformed

BACKLOG = 2048
"""Connections that may wait to be accepted."""


@dataclass(frozen=True)
class Tls:
    """Files in PEM. ``client_ca``: who signs the certificates that clients must show; None: they need none."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class Stopping:
    """What happens once the server is told to stop: ``begin`` is called, for ``delay_s`` everything goes on, and then
    no connection is taken any more, and answers under way get ``limit_s`` to end."""

    begin: Callable[[], None] = lambda: None
    delay_s: float = 0.0
    limit_s: float = 5.0


class StartError(RuntimeError):
    """Something that the user must change before anything can start."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the engine must be stopped by the same signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def listening_socket(
    host: str, port: int, client_timeout_s: float | None = None, *, option: str = "--port"
) -> Iterator[socket.socket]:
    """A port, listened on before anything slow starts: whoever comes meanwhile waits. A port that is only bound is not
    taken, since another program can still bind it, and the one that listens first gets all of it.

    option: what sets the port. client_timeout_s: how long what is sent may wait for a client; then the kernel closes
    the connection.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only on sockets that say they are TCP; with it on, an answer waits some 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if client_timeout_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it. Counted by the kernel, it ends what an application's own limit would leave behind:
            # bytes that wait in a socket which nobody reads.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(client_timeout_s * 1000)))
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another with {option}"
            ) from None
        yield listener


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    *,
    on_malformed: Callable[[Malformed], None],
    stopping: Stopping | None = None,
    tls: Tls | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """uvicorn as a task; left, it stops as ``stopping`` says. ``on_malformed``: called for what is no request."""
    stop = stopping or Stopping()
    # uvicorn counts whole seconds.
    limit_s = max(1, round(stop.limit_s))
    # Nothing here asks for a client's address, so nobody has to believe what a header says of it.
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(BoundedProtocol, on_malformed=on_malformed)),
        ws="none",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        # Which software answers, and with which faults, is nobody's business.
        server_header=False,
        timeout_graceful_shutdown=limit_s,
        backlog=BACKLOG,
    )
    if tls is not None:
        config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs = tls.cert, tls.key, _text(tls.client_ca)
        config.ssl_cert_reqs = ssl.CERT_REQUIRED if tls.client_ca is not None else ssl.CERT_NONE
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    with folded():
        try:
            while not server.started and not task.done():
                await asyncio.sleep(0.02)
            if task.done():
                await task
                raise StartError("the proxy did not start")
            _leave_what_stays_alone()
            yield task
        finally:
            stop.begin()
            if stop.delay_s and not task.done():
                await asyncio.sleep(stop.delay_s)
            server.should_exit = True
            await task


def _leave_what_stays_alone() -> None:
    """What is loaded by now stays to the end. Python's collector would look through all of it again and again, and stop
    every answer for tens of milliseconds each time."""
    gc.collect()
    gc.freeze()


def check_tls(tls: Tls) -> None:
    """Raises ``StartError`` for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_passphrase)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise StartError(f"the TLS files {tls.cert} and {tls.key} cannot be used: {reason}") from None


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; give one without")


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None
