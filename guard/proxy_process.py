"""One proxy process: its server, and beside it the one of the admin API and the console, or of what that asks.

Owns what is refused before anything is served, and in which order the two start and stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from guard.console.app import operators_app
from guard.console.contents import Contents
from guard.console.ended import Ended
from guard.console.peers import Seat, telling
from guard.proxy.app import application
from guard.proxy.services import Services
from guard.proxy_server import Stopping, Tls, check_tls, listening_socket, serving
from guard.settings import Settings
from guard.telemetry.ledger import check_writable


def checked_services(settings: Settings) -> Services:
    """Raises whatever the start must be refused for."""
    check_writable(settings.ledger)
    if (tls := _tls(settings)) is not None:
        check_tls(tls)
    return Services(settings)


@contextlib.asynccontextmanager
async def proxy_running(
    services: Services, listener: socket.socket, seat: Seat | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """The proxy's server, and the admin API's beside it if it has a port. The latter answers until the end. ``seat``:
    of a worker process; there the first has the admin API, and the others tell it of their requests."""
    settings = services.settings

    def begin() -> None:
        services.draining = True

    malformed = services.metrics.count_malformed
    stopping = Stopping(begin, settings.drain_delay_s, settings.drain_timeout_s)
    async with contextlib.AsyncExitStack() as stack:
        if settings.admin_port is not None and seat is not None and seat.number > 0:
            await stack.enter_async_context(telling(Ended(services, Contents(services.ledger)), seat.socket))
        elif settings.admin_port is not None:
            admin = stack.enter_context(
                listening_socket(settings.admin_host, settings.admin_port, option="--admin-port")
            )
            await stack.enter_async_context(
                serving(
                    operators_app(services, seat.others if seat is not None else ()),
                    admin,
                    on_malformed=malformed,
                    tls=_tls(settings),
                )
            )
        yield await stack.enter_async_context(
            serving(application(services), listener, on_malformed=malformed, stopping=stopping, tls=_tls(settings))
        )


def _tls(settings: Settings) -> Tls | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
