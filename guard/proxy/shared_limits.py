"""The same limits, counted in Redis for all replicas of the proxy together.

Owns the scripts that run inside Redis, each of which counts all scopes of a request at once, by Redis' own clock, and
the leases behind the cap of concurrency: a replica that dies gives its requests back when they run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from guard.proxy.keys import Limits
from guard.proxy.limits import CONCURRENT_RETRY_S, Exceeded, Scope, What

log = logging.getLogger("guard.limits")

LEASE_S = 15.0
"""How long the place of a process that died stays taken; of one that lives it is renewed three times as often."""

REDIS_TIMEOUT_S = 0.25
AFTER_ERROR_S = 1.0
"""How long Redis is left alone after it failed, so that not every request waits for it."""

ASK_EVERY_S = 1.0
"""How often Redis is asked at most whether it counts, whoever wants to know."""

TRIED = Scope("tried", Limits())
"""Of nobody, to find that out."""

WHAT: tuple[What, ...] = ("concurrent", "tokens", "requests")
FAILURES = (RedisError, OSError, TimeoutError)

FILLED = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local function filled(account, per_s, per_min)
  local saved = redis.call('HMGET', account, 'requests', 'tokens', 'at')
  local past = math.max(0, now - (tonumber(saved[3]) or now))
  local burst = math.max(1, per_s)
  return math.min(burst, (tonumber(saved[1]) or burst) + past * per_s),
         math.min(per_min, (tonumber(saved[2]) or per_min) + past * per_min / 60)
end
local function save(account, per_s, per_min, requests, tokens)
  -- Kept until it would be full anyway.
  local full = 60
  if per_s > 0 then full = full + (math.max(1, per_s) - requests) / per_s end
  if per_min > 0 then full = full + (per_min - tokens) * 60 / per_min end
  redis.call('HSET', account, 'requests', tostring(requests), 'tokens', tostring(tokens),
             'at', string.format('%.6f', now))
  redis.call('EXPIRE', account, math.ceil(full))
end
"""

ADMIT = (
    FILLED
    + """
local lease, lease_s = ARGV[1], tonumber(ARGV[2])
-- The replica has given up waiting for this answer.
if redis.call('EXISTS', 'guard:forgotten:' .. lease) == 1 then return {0, 0, 0} end
local found = {}
for i = 1, #KEYS / 2 do
  local per_s, per_min, cap = tonumber(ARGV[3 * i]), tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2])
  local requests, tokens = filled(KEYS[2 * i - 1], per_s, per_min)
  redis.call('ZREMRANGEBYSCORE', KEYS[2 * i], '-inf', now)
  if cap > 0 and redis.call('ZCARD', KEYS[2 * i]) >= cap then return {i, 1, 0} end
  if per_min > 0 and tokens < 1 then return {i, 2, math.ceil((1 - tokens) * 60000 / per_min)} end
  if per_s > 0 and requests < 1 then return {i, 3, math.ceil((1 - requests) * 1000 / per_s)} end
  found[i] = {per_s, per_min, requests - 1, tokens}
end
for i = 1, #KEYS / 2 do
  save(KEYS[2 * i - 1], found[i][1], found[i][2], found[i][3], found[i][4])
  redis.call('ZADD', KEYS[2 * i], now + lease_s, lease)
  redis.call('EXPIRE', KEYS[2 * i], math.ceil(lease_s) + 1)
end
return {0, 0, 0}
"""
)

RELEASE = (
    FILLED
    + """
for i = 1, #KEYS / 2 do
  local per_s, per_min = tonumber(ARGV[3 * i]), tonumber(ARGV[3 * i + 1])
  local requests, tokens = filled(KEYS[2 * i - 1], per_s, per_min)
  save(KEYS[2 * i - 1], per_s, per_min, requests, tokens - tonumber(ARGV[2]))
  redis.call('ZREM', KEYS[2 * i], ARGV[1])
end
"""
)

FORGET = """
for i = 1, #KEYS do redis.call('ZREM', KEYS[i], ARGV[1]) end
redis.call('SET', 'guard:forgotten:' .. ARGV[1], '', 'EX', math.ceil(tonumber(ARGV[2])) + 1)
"""
"""Of a lease whose request does not count here, whatever Redis has yet to do: what a replica sent before it gave up
waiting is done when Redis goes on, and may be done after this."""

RENEW = """
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], 'XX', tonumber(time[1]) + tonumber(ARGV[2]), ARGV[1])
redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[2])) + 1)
"""


class SharedLimits:
    """``url``: ``redis://[:PASSWORD@]HOST[:PORT][/DB]`` or ``rediss://``. One Redis, not a cluster of several."""

    def __init__(self, url: str, lease_s: float = LEASE_S) -> None:
        self._redis = Redis.from_url(
            url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S, decode_responses=True
        )
        self._admit = self._redis.register_script(ADMIT)
        self._release = self._redis.register_script(RELEASE)
        self._renew = self._redis.register_script(RENEW)
        self._forget = self._redis.register_script(FORGET)
        self._lease_s = lease_s
        self._held: dict[str, tuple[Scope, ...]] = {}
        self._unsure: dict[str, tuple[Scope, ...]] = {}
        self._quiet_until_s = float("-inf")
        self._asking = asyncio.Lock()
        self._asked_s = float("-inf")
        self._answered = False

    @property
    def reachable(self) -> bool:
        """False for a while after Redis failed."""
        return time.monotonic() >= self._quiet_until_s

    async def answers(self) -> bool:
        """Whether Redis counts, asked now or less than ``ASK_EVERY_S`` ago."""
        async with self._asking:
            if time.monotonic() - self._asked_s >= ASK_EVERY_S:
                try:
                    async with asyncio.timeout(REDIS_TIMEOUT_S):
                        await self._try()
                except FAILURES as error:
                    self._failed(error)
                    self._answered = False
                else:
                    self._quiet_until_s, self._answered = float("-inf"), True
                self._asked_s = time.monotonic()
        return self._answered and self.reachable

    async def _try(self) -> None:
        """What a request does, since one that is full, or reads only, still answers. Raises one of ``FAILURES``."""
        lease, keys, numbers = uuid.uuid4().hex, _keys([TRIED]), _numbers([TRIED])
        await self._admit(keys=keys, args=[lease, self._lease_s, *numbers])
        await self._release(keys=keys, args=[lease, 0, *numbers])

    async def admit(self, lease: str, scopes: Sequence[Scope]) -> Exceeded | None:
        """Raises one of ``FAILURES``; the caller then counts for itself."""
        try:
            await self._forget_unsure()
            which, what, retry_ms = await self._admit(
                keys=_keys(scopes), args=[lease, self._lease_s, *_numbers(scopes)]
            )
        except (asyncio.CancelledError, *FAILURES) as error:
            self._unsure[lease] = tuple(scopes)
            if not isinstance(error, asyncio.CancelledError):
                self._failed(error)
            raise
        if which == 0:
            self._held[lease] = tuple(scopes)
            return None
        name = WHAT[what - 1]
        return Exceeded(scopes[which - 1], name, CONCURRENT_RETRY_S if name == "concurrent" else retry_ms / 1000)

    async def release(self, lease: str, scopes: Sequence[Scope], tokens: int) -> None:
        """Never raises: what Redis does not hear of is told when it is there again, or runs out by itself."""
        self._held.pop(lease, None)
        try:
            await self._release(keys=_keys(scopes), args=[lease, tokens, *_numbers(scopes)])
        except FAILURES as error:
            self._unsure[lease] = tuple(scopes)
            self._failed(error)

    async def _forget_unsure(self) -> None:
        """Take back the leases of which it is not known whether Redis has them."""
        while self._unsure:
            lease, scopes = self._unsure.popitem()
            try:
                await self._forget(keys=[_leases(scope) for scope in scopes], args=[lease, self._lease_s])
            except FAILURES:
                self._unsure[lease] = scopes
                raise

    async def renew(self) -> None:
        """Keep the leases of long answers, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with contextlib.suppress(*FAILURES):
                await self._forget_unsure()
            for lease, scopes in list(self._held.items()):
                for scope in scopes:
                    try:
                        await self._renew(keys=[_leases(scope)], args=[lease, self._lease_s])
                    except FAILURES as error:
                        self._failed(error)

    async def close(self) -> None:
        await self._redis.aclose()

    def _failed(self, error: BaseException) -> None:
        if self.reachable:
            # Its text may hold the address, and with it a password.
            log.error("Redis failed (%s); each replica counts its own requests meanwhile", type(error).__name__)
        self._quiet_until_s = time.monotonic() + AFTER_ERROR_S


def _keys(scopes: Iterable[Scope]) -> list[str]:
    return [key for scope in scopes for key in (f"guard:limits:{scope.name}", _leases(scope))]


def _leases(scope: Scope) -> str:
    return f"guard:leases:{scope.name}"


def _numbers(scopes: Iterable[Scope]) -> list[float]:
    """Requests a second, tokens a minute and the cap of each scope; 0: none."""
    return [
        number or 0
        for scope in scopes
        for number in (scope.limits.requests_per_s, scope.limits.tokens_per_min, scope.limits.concurrent)
    ]
