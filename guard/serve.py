"""``guard serve`` and ``guard proxy``: the engine that a policy needs, and the proxy in front of it, until a signal.

Owns the order of starting and stopping, and the way from a policy to the engine's taps. The proxy's application is
``guard.proxy``'s, the engine's process ``guard.engine_process``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from detectors.base import EngineProbe
from detectors.engine_probes import engine_probes, plan_of, write_probes
from guard.data import steering_folder
from guard.engine_process import LOOPBACK, EngineCommand, EngineError, engine_command
from guard.machine import port_is_free
from guard.mia.engine_config import EngineConfig
from guard.mia.spec import SpanPositions
from guard.models import DEFAULT_MODEL, SOURCES, ModelError, ResolvedModel, resolve_model
from guard.paths import state_folder
from guard.policy import BoundPolicy, PolicyError, PolicySet, bind, build_detectors, load_policies
from guard.policy.calibrated import calibration_remarks
from guard.policy.model_fit import misfits
from guard.proxy.keys import KeysError
from guard.proxy.services import Services, reranker_of
from guard.proxy_process import checked_services, start_remarks, taken_ports
from guard.proxy_server import StartError
from guard.settings import Settings, SettingsError, load_settings
from guard.supervisor import running_engine
from guard.telemetry.ledger import LedgerError
from guard.terminal import pull_with_progress, say, tick_printer
from guard.uses.rerank import RerankerConfig
from guard.workers import proxies


@dataclass(frozen=True)
class ServeOptions:
    """What ``guard serve`` was asked for. ``settings``: those of the proxy that were given, by name."""

    model: str = DEFAULT_MODEL
    engine_port: int = 8001
    compiled: bool = False
    vllm_arguments: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProxyOptions:
    """What ``guard proxy`` was asked for. ``model``: None leaves the choice to the settings' ``config_key``."""

    model: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """An engine and a proxy that run and are ready."""

    engine_url: str
    proxy_url: str
    ledger: Path
    server: asyncio.Task[None] | None = None
    """The proxy's server, or what watches its workers, when it runs in this process."""

    async def wait_ended(self) -> None:
        if self.server is not None:
            await asyncio.shield(self.server)


def serve(options: ServeOptions) -> int:
    """Run until a signal. Returns the exit code."""

    async def run() -> int:
        async with running_pair(options) as pair:
            say(f"ready: {pair.proxy_url}/v1 (Ctrl-C ends)")
            await pair.wait_ended()
        return 0

    return run_until_signal(run())


def serve_proxy(options: ProxyOptions) -> int:
    """Run the proxy alone until a signal. Returns the exit code."""

    async def run() -> int:
        async with running_proxy(options) as server:
            await asyncio.shield(server)
        return 0

    return run_until_signal(run())


def run_until_signal(work: Coroutine[object, object, int]) -> int:
    """Run ``work``; SIGINT and SIGTERM cancel it, so that its context managers stop what they started."""

    async def guarded() -> int:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            say("stopped")
            return 0

    try:
        # Half the time that asyncio's own loop takes for each piece of an answer.
        return uvloop.run(guarded())
    except (StartError, EngineError, ModelError, PolicyError, SettingsError, KeysError, LedgerError) as error:
        say(f"guard: {error}")
        return 1


@contextlib.asynccontextmanager
async def running_pair(options: ServeOptions) -> AsyncIterator[Pair]:
    """Engine and proxy, both ready. What can be refused is refused before the engine's slow start."""
    model = resolve_model(options.model)
    engine_url = f"http://{LOOPBACK}:{options.engine_port}"
    settings = load_settings(**{**options.settings, "upstream": engine_url, "config_key": model.config_key})
    command = _engine_command(options, model, settings)
    with taken_ports(settings) as ports:
        _need_free_port(options.engine_port)
        services = _services(settings)
        await services.providers.check()
        if options.model in SOURCES:
            await asyncio.to_thread(pull_with_progress, options.model)
        say(f"starting vLLM with {model.served_name}; its log: {command.log_file}")
        async with (
            running_engine(command, say, lambda: tick_printer("starting vLLM")),
            proxies(services, ports, say) as server,
        ):
            yield Pair(command.url, _url(settings), settings.ledger, server)


@contextlib.asynccontextmanager
async def running_proxy(options: ProxyOptions) -> AsyncIterator[asyncio.Task[None]]:
    """The proxy alone, ready."""
    given = dict(options.settings)
    if options.model is not None:
        given["config_key"] = resolve_model(options.model).config_key
    settings = load_settings(**given)
    with taken_ports(settings) as ports:
        async with proxies(_services(settings), ports, say) as server:
            behind = ", ".join(settings.upstream) or f"other providers ({settings.providers})"
            say(f"ready: {_url(settings)}/v1, in front of {behind} (Ctrl-C ends)")
            yield server


def _services(settings: Settings) -> Services:
    services = checked_services(settings)
    for remark in start_remarks(services):
        say(f"warning: {remark}")
    return services


def _url(settings: Settings) -> str:
    return f"{'https' if settings.tls_cert else 'http'}://{_in_url(settings.host)}:{settings.port}"


def bound_policies(path: Path, config_key: str, model_configs: Path) -> PolicySet:
    """The policies with their detectors for one model. Raises ``PolicyError`` with file, line and field."""
    vectors = {vector.stem for vector in steering_folder(model_configs, config_key).glob("*.safetensors")}
    return load_policies(path, lambda loaded: bind(loaded, build_detectors(loaded, config_key, model_configs), vectors))


def engine_config_for(
    policies: Sequence[BoundPolicy],
    vectors_folder: Path,
    probes_folder: Path,
    reranker: RerankerConfig | None = None,
) -> EngineConfig:
    """Taps for what the policies' detectors read and their rules steer, for the ``reranker``, and for nothing else.
    ``probes_folder``: where ``probes_for`` are written; the states that they multiply have taps too, for a policy that
    has other weights by then. Raises ``StartError``."""
    for policy in policies:
        if gates := {probe.probe for steering in policy.steerings.values() for probe in steering.probes.values()}:
            raise StartError(
                f"policy {policy.name} has a gate on {', '.join(sorted(gates))}, a probe of the engine; guard serve "
                "starts an engine without any: start vLLM with additional_config.mia.probes, and guard proxy before it"
            )
    steers = [steer for policy in policies for steer in policy.steers]
    plans = [plan_of(detector) for policy in policies for detector in policy.detectors.values()]
    hidden = [capture for plan in plans for capture in plan.hidden.values()]
    attention = [capture for plan in plans for capture in plan.attention.values()]
    probes = probes_for(policies)
    vectors = {steer.vector for steer in steers}
    positions = [*(one.positions for one in hidden), *(probe.positions for probe in probes.values())]
    return EngineConfig(
        hidden_layers=tuple(sorted({capture.layer for capture in hidden})),
        attention_heads=tuple(
            sorted({*(head for one in attention for head in one.heads), *(reranker.heads if reranker else ())})
        ),
        steering_layers=tuple(sorted({steer.layer for steer in steers})),
        steering_vectors=tuple(sorted(vectors)),
        steering_folder=vectors_folder if vectors else None,
        probes={name: probe.layer for name, probe in probes.items()},
        probe_folder=probes_folder if probes else None,
        max_hidden_rows_per_step="tokens" if any(isinstance(one, SpanPositions) for one in positions) else None,
        max_query_rows_per_step="tokens" if reranker else None,
    )


def engine_config_of(model: str, policy: Path, probes: Path, rerank: bool = False) -> str:
    """The JSON for ``--additional-config``; the engine's probes are written to ``probes``. ``rerank``: with the
    reranker's taps. Raises ``ModelError``, ``PolicyError``, ``SettingsError`` and ``StartError``."""
    resolved = resolve_model(model)
    settings = load_settings(rerank=rerank, config_key=resolved.config_key)
    policies = bound_policies(policy, resolved.config_key, settings.model_configs).policies
    folder = steering_folder(settings.model_configs.resolve(), resolved.config_key)
    config = engine_config_for(policies, folder, probes.resolve(), reranker_of(settings))
    write_probes(probes_for(policies).values(), probes)
    return '{"mia": ' + config.model_dump_json(exclude_defaults=True) + "}"


def probes_for(policies: Sequence[BoundPolicy]) -> dict[str, EngineProbe]:
    """What the engine can compute for the policies' detectors, by name."""
    return engine_probes(detector for policy in policies for detector in policy.detectors.values())


def probes_folder(port: int) -> Path:
    """Where the probes lie that ``guard serve`` starts an engine with."""
    return state_folder() / f"engine-{port}-probes"


def _engine_command(options: ServeOptions, model: ResolvedModel, settings: Settings) -> EngineCommand:
    policies = bound_policies(settings.policy, model.config_key, settings.model_configs).policies
    if found := [f"policy {one.name}: {what}" for one in policies for what in misfits(one, Path(model.path))]:
        raise StartError("; ".join(found))
    for one in policies:
        for remark in calibration_remarks(one, Path(model.path)):
            say(f"warning: policy {one.name}: {remark}")
    folder = probes_folder(options.engine_port)
    write_probes(probes_for(policies).values(), folder)
    return engine_command(
        model,
        engine_config_for(
            policies,
            steering_folder(settings.model_configs.resolve(), model.config_key),
            folder,
            reranker_of(settings),
        ),
        port=options.engine_port,
        log_file=state_folder() / f"engine-{options.engine_port}.log",
        compiled=options.compiled,
        extra_arguments=options.vllm_arguments,
    )


def _need_free_port(port: int) -> None:
    if not port_is_free(LOOPBACK, port):
        raise StartError(f"port {port}, for vLLM, is taken; choose another with --engine-port")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
