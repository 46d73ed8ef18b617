"""The first stage of every request: who asks, and whether there is room for it; its policy, chosen by who asks.

Owns the caps and when a request counts against them: from here to its end, whatever that is.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from guard.policy import Judges, NoSuchPolicyError, PolicyStore, RequestFacts
from guard.proxy.errors import GuardUnavailableError, InvalidRequestError, OverloadedError, RateLimitedError
from guard.proxy.exchange import Exchange
from guard.proxy.keys import Caller
from guard.proxy.limits import Exceeded, LocalLimits, Scope, scopes_of
from guard.settings import Settings, SettingsError

if TYPE_CHECKING:
    from guard.proxy.shared_limits import SharedLimits

log = logging.getLogger("guard.limits")

OVERLOAD_RETRY_S = 1.0


class Admission:
    """The room of one process, and of the keys and tenants that use it."""

    def __init__(self, settings: Settings, on_fallback: Callable[[], None] = lambda: None) -> None:
        """``on_fallback``: called for each request with limits that is counted here since Redis does not answer."""
        self._on_fallback = on_fallback
        self._max_concurrent = settings.max_concurrent
        self._in_flight = 0
        self._local = LocalLimits()
        self._shared = _shared(settings)
        self._releasing: set[asyncio.Task[None]] = set()

    async def limits_status(self) -> str:
        """Where limits are counted: ``local``, or ``shared``, or ``degraded`` while Redis does not count."""
        if self._shared is None:
            return "local"
        return "shared" if await self._shared.answers() else "degraded"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From start to stop; what has ended is told to Redis before it is left."""
        if self._shared is None:
            yield
            return
        renewing = asyncio.create_task(self._shared.renew(), name="leases")
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, *self._releasing, return_exceptions=True)
            await self._shared.close()

    @asynccontextmanager
    async def room(self, caller: Caller, tokens: Callable[[], int]) -> AsyncIterator[None]:
        """Count a request while the block runs, and afterwards the ``tokens`` that it used.

        Raises ``OverloadedError`` or ``RateLimitedError``.
        """
        if self._in_flight >= self._max_concurrent:
            raise OverloadedError("the guard has as many requests under way as it may", OVERLOAD_RETRY_S)
        # Counted before anything is awaited, so that no other request takes the same place.
        self._in_flight += 1
        try:
            scopes = scopes_of(caller)
            lease = await self._admit(scopes)
            try:
                yield
            finally:
                self._release(lease, scopes, tokens())
        finally:
            self._in_flight -= 1

    async def _admit(self, scopes: tuple[Scope, ...]) -> str | None:
        """The lease in Redis, None when the request is counted here."""
        lease = uuid.uuid4().hex if scopes and self._shared is not None and self._shared.reachable else None
        if lease is not None and self._shared is not None:
            from guard.proxy.shared_limits import FAILURES

            try:
                exceeded = await self._shared.admit(lease, scopes)
            except FAILURES:
                lease = None
            else:
                _refuse(exceeded)
                return lease
        if scopes and self._shared is not None:
            self._on_fallback()
        _refuse(self._local.admit(scopes))
        return lease

    def _release(self, lease: str | None, scopes: tuple[Scope, ...], tokens: int) -> None:
        if lease is None or self._shared is None:
            self._local.release(scopes, tokens)
            return
        # A task of its own: nobody waits for it, and a request that is cancelled is released too.
        task = asyncio.create_task(self._shared.release(lease, scopes, tokens))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)


def judges_for(policies: PolicyStore, exchange: Exchange, model: str | None) -> Judges:
    """The policies for this request, from now to its end, whatever is reloaded meanwhile.

    Raises ``GuardUnavailableError`` when its key has a policy that is not there: no other one stands in for it; and
    ``InvalidRequestError`` when a header that chooses is there twice.
    """
    record, caller = exchange.record, exchange.caller
    for name in policies.current.selection.headers:
        if len(exchange.headers.getlist(name)) > 1:
            raise InvalidRequestError(f"there is more than one {name} header, by which the policy is chosen", name)
    facts = RequestFacts(
        record.request_id, record.route, model, caller.key_hash, caller.tenant, exchange.headers, caller.policy
    )
    try:
        judges, record.assignment = policies.current.choose(facts)
    except NoSuchPolicyError as error:
        log.error("request %s of key %s: %s", record.request_id, caller.key_id, error)
        raise GuardUnavailableError("this key's policy is not loaded") from None
    record.policy, record.policy_hash = judges.live.name, judges.live.hash
    record.waits = judges.live.waits
    exchange.judges = judges
    return judges


def _refuse(exceeded: Exceeded | None) -> None:
    if exceeded is None:
        return
    limits, who = exceeded.scope.limits, exceeded.scope.kind
    limit = {
        "requests": f"{limits.requests_per_s or 0:g} requests a second",
        "tokens": f"{limits.tokens_per_min} tokens a minute",
        "concurrent": f"{limits.concurrent} requests at once",
    }[exceeded.what]
    wait_s = math.ceil(exceeded.retry_s * 1000) / 1000
    message = f"the {who}'s limit of {limit} is reached; try again in {wait_s:g} s"
    raise RateLimitedError(message, exceeded.retry_s, (who, exceeded.what))


def _shared(settings: Settings) -> SharedLimits | None:
    if settings.redis_url is None:
        return None
    try:
        from guard.proxy.shared_limits import SharedLimits
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise SettingsError("redis_url (GUARD_REDIS_URL): needs the client: pip install 'mia-guard[redis]'") from None
    try:
        return SharedLimits(settings.redis_url.get_secret_value())
    except ValueError:
        # Not shown: it may hold a password.
        raise SettingsError("redis_url (GUARD_REDIS_URL): is no redis://, rediss:// or unix:// URL") from None
