"""One proxy process: its server, and beside it the one of the admin API and the console, or of what that asks.

Owns what is refused before anything is served, and in which order the two start and stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, replace

from guard.console.app import operators_app
from guard.console.contents import Contents
from guard.console.ended import Ended
from guard.console.peers import Seat, telling
from guard.proxy.app import application
from guard.proxy.loops import Hops, own_among
from guard.proxy.services import Services
from guard.proxy_server import Stopping, Tls, check_tls, listening_socket, serving
from guard.settings import Settings, SettingsError, is_loopback
from guard.telemetry.ledger import check_writable


@dataclass(frozen=True)
class Ports:
    """Both are listened on. ``admin``: None where there is no admin API."""

    proxy: socket.socket
    admin: socket.socket | None

    def of_worker(self, number: int) -> Ports:
        """What a worker process gets: the first one has the admin API."""
        return self if number == 0 else replace(self, admin=None)

    def close(self) -> None:
        self.proxy.close()
        if self.admin is not None:
            self.admin.close()


@contextlib.contextmanager
def taken_ports(settings: Settings) -> Iterator[Ports]:
    """Raises ``StartError`` for a port that somebody listens on: another program, or this one through its other
    setting."""
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(listening_socket(settings.host, settings.port, settings.client_timeout_s))
        admin = None
        if settings.admin_port is not None:
            admin = stack.enter_context(
                listening_socket(settings.admin_host, settings.admin_port, option="--admin-port")
            )
        yield Ports(proxy, admin)


def checked_services(settings: Settings, hops: Hops | None = None) -> Services:
    """``hops``: as for ``Services``. Raises whatever the start must be refused for."""
    check_writable(settings.ledger)
    if (tls := _tls(settings)) is not None:
        check_tls(tls)
    services = Services(settings, hops)
    _check_asks_others(settings.upstream, "upstream (GUARD_UPSTREAM)", settings)
    _check_asks_others(
        services.providers.bases, f"providers (GUARD_PROVIDERS): {settings.providers}: api_base", settings
    )
    return services


def _check_asks_others(urls: Iterable[str], named: str, settings: Settings) -> None:
    """Raises ``SettingsError`` for an address that is this proxy's own."""
    if url := own_among(urls, settings.host, settings.port):
        raise SettingsError(
            f"{named}: {url} is where this proxy itself listens ({settings.host}, port {settings.port}): it would ask "
            "itself without end; give the model server's address, or this proxy another --port"
        )


def start_remarks(services: Services) -> list[str]:
    """A sentence for each thing that is likely not as meant, though the proxy can start with it."""
    settings, ring, told = services.settings, services.access.keys.current, []
    if settings.keys is not None and not ring.callers:
        told.append(
            f"no key of {settings.keys} is a client's, so every request is a 401: "
            f"guard keys create --file {settings.keys}"
        )
    if settings.admin_port is None:
        return told
    if not ring.admins:
        told.append(
            f"admin_port is set, and no key of {settings.keys} is an administrator's, so nobody can sign in: "
            f"guard keys create --file {settings.keys} --admin"
        )
    if settings.tls_cert is None and not is_loopback(settings.admin_host):
        told.append(
            f"admin keys and what the console shows cross the network in clear text: admin_host is "
            f"{settings.admin_host}, and there is no tls_cert; leave admin_host at 127.0.0.1, set tls_cert and "
            "tls_key, or have TLS end before it"
        )
    return told


@contextlib.asynccontextmanager
async def proxy_running(
    services: Services, ports: Ports, seat: Seat | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """The proxy's server, and the admin API's beside it if it has a port. The latter answers until the end. ``seat``:
    of a worker process; there the first has the admin API, and the others tell it of their requests. Raises
    ``SettingsError`` for models of other providers that cannot be asked."""
    settings = services.settings

    def begin() -> None:
        services.draining = True

    malformed = services.metrics.count_malformed
    stopping = Stopping(begin, settings.drain_delay_s, settings.drain_timeout_s)
    async with contextlib.AsyncExitStack() as stack:
        if settings.admin_port is not None and seat is not None and seat.number > 0:
            await stack.enter_async_context(telling(Ended(services, Contents(services.ledger)), seat.socket))
        elif ports.admin is not None:
            await stack.enter_async_context(
                serving(
                    operators_app(services, seat.others if seat is not None else ()),
                    ports.admin,
                    on_malformed=malformed,
                    tls=_tls(settings),
                )
            )
        server = await stack.enter_async_context(
            serving(application(services), ports.proxy, on_malformed=malformed, stopping=stopping, tls=_tls(settings))
        )
        # Others are answered meanwhile.
        await services.providers.started()
        yield server


def _tls(settings: Settings) -> Tls | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
