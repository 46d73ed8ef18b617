"""The proxy as an application: its routes, and the stages that a request for an answer passes, outermost first.

    recording   one ledger line and one count for every request, every exception answered        recording.py
    loops       no request that this guard has sent itself                                      loops.py
    access      API key, or loopback only; limits of key and tenant                             access.py, admission.py
    body        read within limits, parsed, refused at the edge when it cannot be guarded        body.py, wire_*.py
    upstream    asked for what the policy reads; closed the moment it is not wanted              upstream.py, answer.py
    policy      readouts to scores to a decision, within a bounded time                          verdict.py
    answer      judged where rules want that, released as the policy's contract says             judging.py, judged.py
    streaming   vLLM's bytes to the client                                                       relay.py
    ledger      written by a thread, after the answer                                            guard/telemetry

Owns the table of routes. A path that is not in it is refused, unless the operator lets it pass (``passing.py``):
nothing else reaches vLLM past the policy.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp

from guard.policy.judged_paths import EMBEDDINGS, RERANK
from guard.proxy.answer import Whole
from guard.proxy.chat import answering
from guard.proxy.embeddings import embeddings
from guard.proxy.errors import ModelNotFoundError, UpstreamError
from guard.proxy.exchange import JSON, Exchange
from guard.proxy.monitor import monitor_routes
from guard.proxy.passing import other
from guard.proxy.recording import Recorded
from guard.proxy.relay import relay_whole
from guard.proxy.rerank import reranking
from guard.proxy.services import FORMS, MODELS, OTHER, Services
from guard.proxy.upstream import NO_HEADERS
from guard.settings import SettingsError

UNREADABLE_LIST = "the model server's list of models cannot be read"


def application(services: Services) -> ASGIApp:
    """Files and connections are opened by the application's lifespan. A router and no framework around it: every layer
    there would pass on every piece of every answer."""

    @asynccontextmanager
    async def lifespan(_app: object) -> AsyncIterator[None]:
        async with services.running():
            yield

    config = services.reranker
    rerankers = {} if config is None else {path: reranking(config, path) for path in RERANK}
    routes = [
        *(Route(form.route, Recorded(services, form.route, answering(form))) for form in FORMS),
        Route(EMBEDDINGS, Recorded(services, EMBEDDINGS, embeddings)),
        *(Route(path, Recorded(services, RERANK[0], handler)) for path, handler in rerankers.items()),
        Route(MODELS, Recorded(services, MODELS, models)),
        # Names of models may have slashes.
        Route(MODELS + "/{model:path}", Recorded(services, MODELS, model)),
        *monitor_routes(services),
    ]
    for path in services.settings.passed_paths:
        if any(route.matches({"type": "http", "method": "GET", "path": path})[0] != Match.NONE for route in routes):
            raise SettingsError(f"passed_paths (GUARD_PASSED_PATHS): {path} is the guard's own, and is not passed on")
    router = Router(routes, redirect_slashes=False, lifespan=lifespan)
    router.default = Recorded(services, OTHER, other)
    return router


async def models(services: Services, exchange: Exchange) -> None:
    """vLLM's list of models, and those of other providers."""
    await relay_whole(exchange, await _list_of_models(services, exchange))


async def model(services: Services, exchange: Exchange) -> None:
    """One model of that list; vLLM has no route for it."""
    whole = await _list_of_models(services, exchange)
    if whole.status == 200:
        whole = replace(whole, body=_entry(whole.body, exchange.scope["path_params"]["model"]))
    await relay_whole(exchange, whole)


async def names_of_models(services: Services, request_id: str) -> list[str]:
    """Of vLLM's models and those of other providers. Raises ``UpstreamError``."""
    whole = await _all_models(services, request_id)
    try:
        return [str(one["id"]) for one in json.loads(whole.body)["data"]]
    except (ValueError, LookupError, TypeError):
        raise UpstreamError(UNREADABLE_LIST) from None


async def _list_of_models(services: Services, exchange: Exchange) -> Whole:
    exchange.need_method("GET")
    return await exchange.until_client_leaves(_all_models(services, exchange.record.request_id, exchange.passed))


async def _all_models(services: Services, request_id: str, headers: Mapping[str, str] = NO_HEADERS) -> Whole:
    others = services.providers.names
    if services.settings.upstream:
        whole = await services.upstream.get(MODELS, request_id, headers)
    else:
        whole = Whole(200, JSON, b'{"object": "list", "data": []}')
    if whole.status != 200 or not others:
        return whole
    entries = [{"id": name, "object": "model", "created": 0, "owned_by": "provider"} for name in others]
    try:
        list_ = json.loads(whole.body)
        return replace(whole, body=json.dumps({**list_, "data": [*list_["data"], *entries]}).encode())
    except (ValueError, LookupError, TypeError):
        raise UpstreamError(UNREADABLE_LIST) from None


def _entry(list_: bytes, model_id: str) -> bytes:
    """Raises ``ModelNotFoundError``, and ``UpstreamError`` for what is no list of models."""
    try:
        found = next((json.dumps(one) for one in json.loads(list_)["data"] if one["id"] == model_id), None)
    except (ValueError, LookupError, TypeError):
        raise UpstreamError(UNREADABLE_LIST) from None
    if found is None:
        raise ModelNotFoundError("no such model; GET /v1/models lists them", "model")
    return found.encode()
