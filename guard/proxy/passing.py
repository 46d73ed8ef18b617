"""Every path that the guard does not judge: refused, but for those that the operator lets pass as they are.

Owns that list's meaning. What passes here is seen by no policy.
"""

from __future__ import annotations

from guard.proxy.access import check_media_type
from guard.proxy.errors import NotFoundError
from guard.proxy.exchange import Exchange
from guard.proxy.loops import VIA
from guard.proxy.services import Services, served


async def other(services: Services, exchange: Exchange) -> None:
    """Raises ``NotFoundError`` for a path that is not in ``passed_paths``."""
    path, method, settings = exchange.scope["path"], exchange.scope["method"], services.settings
    if path not in settings.passed_paths:
        raise NotFoundError(f"the guard serves {served(services.reranker is not None)}")
    exchange.record.passed = path
    if method not in ("GET", "HEAD") and not services.access.keys.current.asked_for:
        check_media_type(exchange.headers)
    body = await exchange.read_body(settings.max_body_bytes, settings.body_timeout_s)
    await exchange.until_client_leaves(_pass(services, exchange, method, path, body))


async def _pass(services: Services, exchange: Exchange, method: str, path: str, body: bytes) -> None:
    query = exchange.scope["query_string"].decode("latin-1")
    target = f"{path}?{query}" if query else path
    media_type = exchange.headers.get("content-type")
    request_id, via = exchange.record.request_id, {VIA: exchange.via}
    async with services.upstream.forward(method, target, body, request_id, media_type, via) as answer:
        exchange.record.outcome = "completed" if answer.status < 400 else "upstream_error"
        await exchange.start(answer.status, answer.headers)
        async for chunk in answer.chunks():
            await exchange.stream(chunk)
        await exchange.end()
