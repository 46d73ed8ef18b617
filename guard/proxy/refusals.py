"""Requests that are refused before a policy looks at them cost a client nothing, and a flood of them must not push out
what the ledger, the traces and the console have of others.

Owns which of these have a ledger entry of their own, and the entries that count the rest: of each caller and reason the
first ``MOST_A_WINDOW`` a minute, then one entry for all of a route. Metrics count every one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from guard.telemetry.record import RequestRecord

MOST_A_WINDOW = 10
WINDOW_S = 60.0

_Like = tuple[str | None, str | None, str, str | None, int | None]
"""Key, tenant, route, error code and status."""


@dataclass
class Refusals:
    """``append``: writes an entry. Callers that have no key of ours are one caller."""

    append: Callable[[RequestRecord], None]
    _written: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    _counting: dict[_Like, RequestRecord] = field(default_factory=dict)

    def is_one_too_many(self, record: RequestRecord) -> bool:
        """Whether this refusal has no entry of its own; then it is counted here. Call it once for each."""
        caller = (record.key, record.error_code)
        if self._written[caller] < MOST_A_WINDOW:
            self._written[caller] += 1
            return False
        like = (record.key, record.tenant, record.route, record.error_code, record.status)
        if (together := self._counting.get(like)) is not None:
            together.count += 1
        else:
            self._counting[like] = _entry_for(record)
        return True

    async def watch(self) -> None:
        """Begin a new minute after each; cancel it."""
        while True:
            await asyncio.sleep(WINDOW_S)
            self.close_window()

    def close_window(self) -> None:
        """Write what was counted, and begin anew."""
        counting, self._counting = self._counting, {}
        self._written.clear()
        for together in counting.values():
            self.append(together)


def _entry_for(first: RequestRecord) -> RequestRecord:
    """What stands for all that are like the first: nothing in it is of one request alone but its time."""
    return RequestRecord(
        first.route,
        first.policy,
        first.policy_hash,
        started_at=first.started_at,
        key=first.key,
        tenant=first.tenant,
        outcome=first.outcome,
        error_code=first.error_code,
        status=first.status,
    )
