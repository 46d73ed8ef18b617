"""The proxy as an application: its routes, and the stages that a chat request passes, outermost first.

    recording   one ledger line and one count for every request, every exception answered        recording.py
    access      API key, or loopback only                                                        access.py
    body        read within limits, parsed, refused at the edge when it is no chat request       body.py
    upstream    asked for what the policy reads; closed the moment it is not wanted              upstream.py, answer.py
    policy      readouts to scores to a decision, within a bounded time                          verdict.py
    streaming   vLLM's bytes to the client                                                       relay.py
    ledger      written by a thread, after the answer                                            guard/telemetry

Owns the table of routes. A path that is not in it is refused: nothing reaches vLLM past the policy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.routing import Route

from guard.proxy.chat import chat
from guard.proxy.errors import NotFoundError
from guard.proxy.exchange import Exchange
from guard.proxy.monitor import monitor_routes
from guard.proxy.recording import Recorded
from guard.proxy.relay import relay_whole
from guard.proxy.services import CHAT, MODELS, OTHER, Services
from guard.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """Raises ``PolicyError``. Files and connections are opened by the application's lifespan."""
    services = Services(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with services.running():
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.router.routes.append(Route(CHAT, Recorded(services, CHAT, chat)))
    app.router.routes.append(Route(MODELS, Recorded(services, MODELS, models)))
    app.include_router(monitor_routes(services))
    app.router.default = Recorded(services, OTHER, unknown)
    return app


async def models(services: Services, exchange: Exchange) -> None:
    """vLLM's list of models."""
    services.access.check(exchange.headers)
    exchange.need_method("GET")
    list_ = services.upstream.get(MODELS, exchange.record.request_id)
    await relay_whole(exchange, await exchange.until_client_leaves(list_))


async def unknown(services: Services, exchange: Exchange) -> None:
    """Every other path."""
    services.access.check(exchange.headers)
    raise NotFoundError(f"the guard serves POST {CHAT} and GET {MODELS}")
