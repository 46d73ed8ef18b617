"""Rate limits and caps of concurrency, counted in this process.

Owns the arithmetic: a bucket that fills at the allowed rate, for requests and for tokens, by a clock that never jumps.
A request is admitted by all of its scopes or by none. Redis' counterpart is ``shared_limits``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from guard.proxy.keys import Caller, Limits

What = Literal["requests", "tokens", "concurrent"]

CONCURRENT_RETRY_S = 1.0
"""When to try again after a cap of concurrency: nobody knows when an answer ends."""


@dataclass(frozen=True)
class Scope:
    """Whose requests are counted together: ``key:ID`` or ``tenant:NAME``."""

    name: str
    limits: Limits

    @property
    def kind(self) -> Literal["key", "tenant"]:
        return "key" if self.name.startswith("key:") else "tenant"


@dataclass(frozen=True)
class Exceeded:
    """The first limit that does not admit a request."""

    scope: Scope
    what: What
    retry_s: float


def scopes_of(caller: Caller) -> tuple[Scope, ...]:
    """The scopes with limits that a request counts in."""
    key = (Scope(f"key:{caller.key_id}", caller.limits),) if caller.limits.any else ()
    tenant = (Scope(f"tenant:{caller.tenant}", caller.tenant_limits),) if caller.tenant_limits.any else ()
    return key + tenant


def burst_of(requests_per_s: float) -> float:
    """Requests that may come at once."""
    return max(1.0, requests_per_s)


@dataclass
class Account:
    """What one scope has left. None: nothing was used yet. ``at_s``: when that was so."""

    requests: float | None = None
    tokens: float | None = None
    at_s: float = 0.0
    in_flight: int = 0

    def fill(self, limits: Limits, now_s: float) -> None:
        """Add what the time since ``at_s`` allows."""
        past_s, self.at_s = now_s - self.at_s, now_s
        if (rate := limits.requests_per_s) is not None:
            burst = burst_of(rate)
            self.requests = min(burst, (burst if self.requests is None else self.requests) + past_s * rate)
        if limits.tokens_per_min is not None:
            full = float(limits.tokens_per_min)
            self.tokens = min(full, (full if self.tokens is None else self.tokens) + past_s * full / 60)

    def refuses(self, limits: Limits) -> tuple[What, float] | None:
        """What does not admit one more request, and seconds until it may."""
        if limits.concurrent is not None and self.in_flight >= limits.concurrent:
            return "concurrent", CONCURRENT_RETRY_S
        if limits.tokens_per_min is not None and self.tokens is not None and self.tokens < 1:
            return "tokens", (1 - self.tokens) * 60 / limits.tokens_per_min
        if limits.requests_per_s is not None and self.requests is not None and self.requests < 1:
            return "requests", (1 - self.requests) / limits.requests_per_s
        return None


class LocalLimits:
    """Accounts of the scopes that were seen; there are as many as keys and tenants. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def admit(self, scopes: Sequence[Scope]) -> Exceeded | None:
        """Count one request as under way in every scope, unless one refuses it: then it counts in none."""
        now_s = self._clock()
        accounts = [self._filled(scope, now_s) for scope in scopes]
        for scope, account in zip(scopes, accounts, strict=True):
            if (refusal := account.refuses(scope.limits)) is not None:
                return Exceeded(scope, *refusal)
        for account in accounts:
            account.in_flight += 1
            if account.requests is not None:
                account.requests -= 1
        return None

    def release(self, scopes: Sequence[Scope], tokens: int) -> None:
        """An admitted request has ended, and used ``tokens``."""
        now_s = self._clock()
        for scope in scopes:
            account = self._filled(scope, now_s)
            account.in_flight -= 1
            if account.tokens is not None:
                account.tokens -= tokens

    def _filled(self, scope: Scope, now_s: float) -> Account:
        account = self._accounts.setdefault(scope.name, Account(at_s=now_s))
        account.fill(scope.limits, now_s)
        return account
