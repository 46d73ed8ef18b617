"""The outermost stage: every request, however it ends, is answered, counted, and has one line in the ledger; a flood of
those that are refused for their key or by a limit has fewer (``refusals.py``).

Owns the way from an exception to an answer and an outcome. Logs no text of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from guard.proxy.access import client_request_id
from guard.proxy.errors import ApiError, InternalError, StoppedError, UpstreamError, UpstreamSilentError
from guard.proxy.exchange import ClientGoneError, Exchange
from guard.proxy.services import Services
from guard.proxy.usage import expect_nothing, settle
from guard.telemetry.record import RequestRecord

log = logging.getLogger("guard.proxy")

LAST_WORDS_S = 1.0
"""How long a client may take to accept that the proxy stops."""

AFTERWARDS_S = 1.5
"""How long a record waits for what its client did not: shorter than a stop waits for records."""

Handler = Callable[[Services, Exchange], Awaitable[None]]


class Recorded:
    """One route as an ASGI application."""

    def __init__(self, services: Services, route: str, handler: Handler) -> None:
        self._services = services
        self._route = route
        self._handler = handler
        self._in_flight = services.metrics.in_flight.labels(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        services = self._services
        # Until it is known who asks for what, the default policy stands for the request.
        policy = services.policies.current.default.live
        record = RequestRecord(
            self._route, policy.name, policy.hash, client_request_id=client_request_id(Headers(scope=scope))
        )
        services.under_way += 1
        self._in_flight.inc()
        exchange = Exchange(scope, receive, send, record)
        exchange.trace = services.tracing.begin(record, scope["method"], exchange.headers)
        try:
            await answer(exchange, self._admitted(exchange))
            record.total_s = time.perf_counter() - record.started_s
            with contextlib.suppress(asyncio.CancelledError):
                await exchange.settle(0.0 if services.draining else AFTERWARDS_S)
        finally:
            record.total_s = record.total_s or time.perf_counter() - record.started_s
            self._in_flight.dec()
            services.metrics.count(record)
            refused_early = not exchange.known or record.limit is not None
            if not (refused_early and services.refusals.is_one_too_many(record)):
                self._note(exchange)
            services.under_way -= 1

    def _note(self, exchange: Exchange) -> None:
        """In the ledger, as a trace, and for who looks on. A span that is not ended is never sent."""
        services, record = self._services, exchange.record
        services.ledger.append(record.to_entry(), exchange.capturing)
        services.tracing.end(exchange.trace, record)
        services.recent.add(record, exchange.judges)

    async def _admitted(self, exchange: Exchange) -> None:
        """Every route is for those who may ask, as often as they may."""
        services, record = self._services, exchange.record
        exchange.via = services.hops.via(exchange.headers)
        caller = exchange.caller = services.access.check(exchange.headers)
        exchange.known = True
        record.key, record.tenant = caller.key_id, caller.tenant
        try:
            async with services.admission.room(caller, lambda: record.tokens):
                try:
                    await self._handler(services, exchange)
                except UpstreamError as error:
                    # A model server that takes too long has worked all the while.
                    if not record.frames and not isinstance(error, UpstreamSilentError):
                        expect_nothing(record)
                    raise
                finally:
                    settle(record, exchange.sent, exchange.sent_times)
        finally:
            services.access.keys.count(caller, record.tokens)


async def answer(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``, which answers; whatever it raises becomes an answer and an outcome."""
    record = exchange.record
    try:
        await work
    except ClientGoneError:
        record.outcome = "client_gone"
    except ApiError as error:
        broke_off = isinstance(error, UpstreamError) and exchange.started
        record.outcome = "upstream_broken" if broke_off else error.outcome
        record.limit = error.limit
        await exchange.fail(error)
    except asyncio.CancelledError:
        # Not raised again: the task ends here, and uvicorn would log it as a failure, with a traceback.
        record.outcome = "stopped"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await exchange.fail(StoppedError("the guard is stopping; try again"))
    except Exception as error:
        record.outcome = "internal_error"
        # Where and what, without the exception's own text, which may quote the request.
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("request %s: %s\n%s", record.request_id, type(error).__name__, where)
        await exchange.fail(InternalError("the guard failed; its log says where"))
