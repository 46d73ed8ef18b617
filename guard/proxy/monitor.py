"""What operators and load balancers ask: does the proxy live, is it ready, its metrics.

Owns these answers. They are not in the ledger, and hold nothing of any request.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from guard.proxy.errors import ApiError
from guard.proxy.loops import VIA
from guard.proxy.services import Services
from guard.telemetry.metrics import CONTENT_TYPE


def monitor_routes(services: Services) -> list[Route]:
    """Open to everyone who can reach the port; without API keys that is this machine."""

    async def live(_request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> JSONResponse:
        try:
            via = services.hops.via(request.headers)
        except ApiError as error:
            return _failed(error)
        healthy, of = await services.upstream.healthy({VIA: via}), len(services.upstream.replicas.all)
        engine, providers, policies = healthy > 0 or of == 0, services.providers, services.policies
        # Providers themselves are asked when somebody wants an answer. The process that asks them may come back while
        # the engine goes on answering; before it was there once, something is wrong with what it needs.
        answers = engine and providers.ready and (of > 0 or providers.state in (None, "ok"))
        # Whoever can reach the port may ask: what is wrong with a file is for the log.
        now = {
            "status": "draining" if services.draining else "ok" if answers else "unavailable",
            "engine": "ok" if engine else "unavailable",
            "engines": {"healthy": healthy, "of": of},
            **({"providers": providers.state} if providers.names else {}),
            "policy": policies.current.default.live.label,
            "policies_version": policies.current.hash[:12],
            "policies_reload": "ok" if policies.error is None else "failed",
            "keys_reload": "ok" if services.access.keys.error is None else "failed",
            "limits": await services.admission.limits_status(),
            # Answers go on: what waits is kept, and taking the proxy out would not empty the disk.
            "ledger": "degraded" if services.ledger.delayed else "ok",
        }
        return JSONResponse(now, 200 if now["status"] == "ok" else 503)

    async def metrics(request: Request) -> Response:
        try:
            services.access.check_host(request.headers)
        except ApiError as error:
            return _failed(error)
        # Tens of milliseconds where several processes share their numbers: in a thread, so that no answer waits for it.
        return Response(await asyncio.to_thread(services.metrics.exposition), media_type=CONTENT_TYPE)

    answers = {"/livez": live, "/readyz": ready, "/health": ready, "/metrics": metrics}
    # Some load balancers ask with HEAD, which goes with GET.
    return [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]


def _failed(error: ApiError) -> JSONResponse:
    return JSONResponse(error.to_wire(), error.status)
