"""What every request of one proxy process shares: the settings, the bound policy, and the open resources.

Owns building and closing them. Holds nothing of any request but how many are under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from guard.policy import bind, build_detectors, load_policy
from guard.proxy.access import Access
from guard.proxy.upstream import Upstream
from guard.settings import Settings
from guard.telemetry.ledger import Ledger
from guard.telemetry.metrics import Metrics

CHAT, MODELS, OTHER = "/v1/chat/completions", "/v1/models", "other"
ROUTES = (CHAT, MODELS, OTHER)
"""The values of the label ``route``."""

DRAIN_LIMIT_S = 2.0


class Services:
    """Raises ``PolicyError`` when the policy cannot be used with this model's calibrations."""

    def __init__(self, settings: Settings) -> None:
        loaded = load_policy(settings.policy)
        self.settings = settings
        self.policy = bind(loaded, build_detectors(loaded, settings.config_key, settings.model_configs))
        self.access = Access(settings.api_key_hashes)
        self.metrics = Metrics(
            self.policy.name, self.policy.hash, ROUTES, self.policy.rule_names, self.policy.detector_kinds
        )
        self.ledger = Ledger(settings.ledger, self.metrics.count_entries)
        self.upstream = Upstream(settings)
        self.under_way = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From start to stop. The ledger closes last, when requests that were cut have written their entry."""
        with self.ledger:
            async with self.upstream:
                yield
                await self._drained()

    async def _drained(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_LIMIT_S):
                while self.under_way:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            return
