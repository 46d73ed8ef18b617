"""The proxy's HTTP server: its port, taken early, and uvicorn as a task that ends when its block is left.

Owns sockets and uvicorn's settings. What it serves is any ASGI application; signals are the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI

STOP_LIMIT_S = 5
"""How long answers under way may take to end once the server is told to stop."""


class StartError(RuntimeError):
    """Something that the user must change before anything can start."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the engine must be stopped by the same signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def listening_socket(host: str, port: int) -> Iterator[socket.socket]:
    """The proxy's port, taken before anything slow starts, so that no other program can take it meanwhile."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only on sockets that say they are TCP; with it on, an answer waits some 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise StartError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from None
        yield listener


@contextlib.asynccontextmanager
async def serving(app: FastAPI, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """uvicorn as a task; left, it lets answers under way end for ``STOP_LIMIT_S``."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_LIMIT_S)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.02)
        if task.done():
            await task
            raise StartError("the proxy did not start")
        yield task
    finally:
        server.should_exit = True
        await task
