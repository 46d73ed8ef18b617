"""What every request of one proxy process shares: the settings, the policies, and the open resources.

Owns building and closing them. Holds nothing of any request but how many are under way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from detectors.isolated import IsolatedText
from detectors.model_config import ModelConfigError
from guard.policy import BoundPolicy, LoadedPolicy, PolicySet, PolicyStore, bind, build_detectors
from guard.policy.judged_paths import EMBEDDINGS, RERANK
from guard.policy.routing import check_routes
from guard.policy.selection import keys_without_policy
from guard.policy.store import Reload
from guard.proxy.access import Access
from guard.proxy.admission import Admission
from guard.proxy.answer import Answer
from guard.proxy.body import GuardedRequest
from guard.proxy.client_threads import ClientThreads
from guard.proxy.errors import ModelNotFoundError
from guard.proxy.exchange import Exchange
from guard.proxy.key_store import KeyStore
from guard.proxy.loops import Hops
from guard.proxy.providers import UNREAD, Providers
from guard.proxy.refusals import Refusals
from guard.proxy.upstream import Upstream
from guard.proxy.usage import count_event, expect
from guard.proxy.wire import Texts
from guard.proxy.wire_choices import chat_form, completions_form
from guard.proxy.wire_messages import messages_form
from guard.proxy.wire_responses import responses_form
from guard.settings import Settings, SettingsError
from guard.telemetry.chain import Secret
from guard.telemetry.ledger import Ledger
from guard.telemetry.ledger_file import Keeping
from guard.telemetry.metrics import Metrics, PolicyLabels
from guard.telemetry.recent import Recent
from guard.telemetry.tracing import Tracing, TracingError
from guard.uses.rerank import RerankerConfig, load_reranker

log = logging.getLogger("guard.keys")

FORMS = (chat_form, completions_form, responses_form, messages_form)
MODELS, OTHER = "/v1/models", "other"

GUARDED = (*(form.route for form in FORMS), EMBEDDINGS)
ROUTES = (*GUARDED, RERANK[0], MODELS, OTHER)
"""The values of the label ``route``."""

ENGINE = "vllm"
"""``gen_ai.provider.name`` of the model server."""

PROBES_EVERY_S = 5.0
"""How often it is asked which probes the engine has: it may have been started anew."""

DRAIN_LIMIT_S = 2.0

KEPT_FOR_CONSOLE = 1000
"""Requests that ended last and can be looked at; some kilobytes each."""

KEPT_PASSED = KEPT_FAILED = 200
"""Those that did not come to a policy, besides: of paths that no policy sees, and those that were refused or failed."""


class Services:
    """``hops``: shared with other processes of the same guard. Raises ``PolicyError`` when the policies cannot be used
    with this model's calibrations, ``KeysError`` and ``SettingsError``."""

    def __init__(self, settings: Settings, hops: Hops | None = None) -> None:
        self.settings = settings
        self.providers = Providers(settings.providers, settings.read_timeout_s)
        self.policies = PolicyStore(settings.policy, self._bound, self._reloaded)
        limits_count = settings.workers == 1 or settings.redis_url is not None
        self.metrics = Metrics(ROUTES)
        keys = KeyStore(
            settings.keys, settings.api_key_hashes, limits_count=limits_count, on_reload=self._keys_reloaded
        )
        self.access = Access(keys)
        self._warn_of_keys(self.policies.current)
        self.admission = Admission(settings, self.metrics.limit_fallbacks.inc)
        self._announce(self.policies.current)
        self.ledger = Ledger(
            settings.ledger,
            self.metrics.count_entries,
            self.metrics.ledger_waiting.inc,
            secret=_secret(settings),
            keeping=_keeping(settings),
        )
        self.refusals = Refusals(lambda record: self.ledger.append(record.to_entry()))
        self.tracing = _tracing(settings)
        self.recent = Recent(
            *((KEPT_FOR_CONSOLE, KEPT_PASSED, KEPT_FAILED) if settings.admin_port is not None else (0, 0, 0))
        )
        self.hops = hops or Hops()
        self.upstream = Upstream(settings, self.hops)
        self.reranker = reranker_of(settings)
        self.threads = ClientThreads()
        self.under_way = 0
        self.draining = False
        """Told to stop: no longer ready, and still answering."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From start to stop. The ledger closes last, when requests that were cut have written their entry."""
        for one in _isolated(self.policies.current):
            one.start()
        watching = [asyncio.create_task(one.watch()) for one in (self.policies, self.access.keys, self.refusals)]
        try:
            with self.ledger:
                async with self.tracing.running(), self.upstream, self.providers.running(), self.admission.running():
                    await self._ask_for_probes()
                    watching.append(asyncio.create_task(self._watch_probes()))
                    try:
                        yield
                        await self._drained()
                    finally:
                        self.refusals.close_window()
        finally:
            self.recent.close()
            self.threads.close()
            for one in _isolated(self.policies.current):
                one.close()
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _watch_probes(self) -> None:
        while self.settings.upstream_plugin and self.settings.upstream:
            await asyncio.sleep(PROBES_EVERY_S)
            await self._ask_for_probes()

    async def _ask_for_probes(self) -> None:
        """Have the engine multiply where it was started with the weights, and send states where it was not."""
        if not self.settings.upstream_plugin:
            return
        probes = await self.upstream.probes()
        if probes == self.policies.probes:
            return
        try:
            await asyncio.to_thread(self.policies.compute_by, probes)
        except Exception:  # a detector may be anybody's; as it was, everything goes on
            log.exception("detectors are not moved to the engine's probes")

    def unread(self, model: str) -> str | None:
        """Why nothing can be read inside a model that somebody asks for; None where it can."""
        if self.providers.has(model):
            return UNREAD
        return None if self.settings.upstream_plugin else "vLLM runs without the plugin (upstream_plugin)"

    def ask(
        self, route: str, request: GuardedRequest[Texts], spec: str | None, exchange: Exchange, *, early: bool
    ) -> AbstractAsyncContextManager[asyncio.Task[Answer]]:
        """Send a request to whoever serves its model; as ``Upstream.ask``. ``spec``: what vLLM is asked to read."""
        if exchange.record.sent_s is None:
            exchange.record.sent_s = time.perf_counter()
        elsewhere = self.providers.has(request.model)
        if not elsewhere and not self.settings.upstream:
            raise ModelNotFoundError("no such model; GET /v1/models lists them", "model")
        exchange.record.provider = self.providers.provider_of(request.model) if elsewhere else ENGINE
        expect(exchange.record, request, exchange.sent, elsewhere=elsewhere)
        exchange.sent = request
        if elsewhere:
            threads = self.threads.of(exchange.caller.key_hash)
            return self.providers.ask(route, request, exchange.via, threads, partial(count_event, exchange.record))
        return self.upstream.ask(
            route,
            request.to_json(spec),
            exchange.record.request_id,
            exchange.passed,
            early=early,
            affinity=exchange.affinity,
        )

    def _bound(self, loaded: LoadedPolicy) -> BoundPolicy:
        check_routes(loaded, self.providers.names)
        return bind(loaded, build_detectors(loaded, self.settings.config_key, self.settings.model_configs))

    def _reloaded(self, result: Reload, policies: PolicySet) -> None:
        if result == "success":
            self._announce(policies)
            for one in _isolated(policies):
                one.start()
            for one in _isolated(self.policies.current):
                one.retire()
            self._warn_of_keys(policies)
        self.metrics.count_reload(result)

    def _keys_reloaded(self, in_force: bool) -> None:
        self.metrics.show_keys(in_force)
        if in_force:
            self._warn_of_keys(self.policies.current)

    def _warn_of_keys(self, policies: PolicySet) -> None:
        for remark in keys_without_policy(policies.selection, self.access.keys.current.policies):
            log.warning("%s", remark)

    def _announce(self, policies: PolicySet) -> None:
        """Make room for what requests that these policies judge will be counted under, before any is."""
        pairs = [(live, shadow) for live, shadow in policies.selection.pairs if shadow is not None]
        self.metrics.show([_labels(one) for one in policies.policies], pairs)

    async def _drained(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_LIMIT_S):
                while self.under_way:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            return


def served(reranks: bool) -> str:
    """The paths that a guard has, for who asks for another."""
    return f"POST {', '.join((*GUARDED, *(RERANK if reranks else ())))} and GET {MODELS}"


def reranker_of(settings: Settings) -> RerankerConfig | None:
    """The heads to rank by; None where the reranker is off. Raises ``SettingsError``."""
    if not settings.rerank:
        return None
    try:
        return load_reranker(settings.model_configs / "core_reranker" / f"{settings.config_key}.json")
    except ModelConfigError as error:
        raise SettingsError(f"rerank (GUARD_RERANK): {error}") from None


def _secret(settings: Settings) -> Secret | None:
    return None if settings.ledger_key is None else Secret.of(settings.ledger_key.get_secret_value())


def _tracing(settings: Settings) -> Tracing:
    try:
        return Tracing(settings.otlp_endpoint)
    except TracingError as error:
        raise SettingsError(f"otlp_endpoint (GUARD_OTLP_ENDPOINT): {error}") from None


def _keeping(settings: Settings) -> Keeping:
    """As ``Keeping`` counts: in seconds."""
    hours, days = settings.ledger_max_hours, settings.ledger_keep_days
    return Keeping(
        settings.ledger_max_bytes,
        None if hours is None else hours * 3600,
        settings.ledger_keep_files,
        None if days is None else days * 86400,
    )


def _isolated(policies: PolicySet) -> list[IsolatedText]:
    """Detectors with processes of their own, which load before a text comes."""
    every = (one for policy in policies.policies for one in policy.detectors.values())
    return [one for one in every if isinstance(one, IsolatedText)]


def _labels(policy: BoundPolicy) -> PolicyLabels:
    bounds = [(one.rule.name, *bound) for one in policy.rules for bound in one.bounds]
    return PolicyLabels(policy.name, policy.hash, policy.rule_names, policy.detector_kinds, bounds)
