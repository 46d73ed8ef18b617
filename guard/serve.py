"""``guard serve`` and ``guard proxy``: the engine that a policy needs, and the proxy in front of it, until a signal.

Owns the order of starting and stopping, and the way from a policy to the engine's taps. The proxy's application is
``guard.proxy``'s, the engine's process ``guard.engine_process``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from guard.data import data_folder, default_policy, steering_folder
from guard.engine_process import LOOPBACK, EngineCommand, EngineError, engine_command
from guard.machine import port_is_free
from guard.mia.engine_config import EngineConfig
from guard.models import DEFAULT_MODEL, SOURCES, ModelError, ResolvedModel, resolve_model
from guard.paths import state_folder
from guard.policy import BoundPolicy, PolicyError, PolicySet, bind, build_detectors, load_policies
from guard.proxy.app import create_app
from guard.proxy.keys import KeysError
from guard.proxy_server import StartError, listening_socket, serving
from guard.settings import SettingsError, load_settings
from guard.supervisor import running_engine
from guard.telemetry.ledger import LedgerError, check_writable
from guard.terminal import pull_with_progress, say, tick_printer


@dataclass(frozen=True)
class ServeOptions:
    """What ``guard serve`` was asked for."""

    model: str = DEFAULT_MODEL
    policy: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    engine_port: int = 8001
    ledger: Path | None = None
    compiled: bool = False
    vllm_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProxyOptions:
    """What ``guard proxy`` was asked for."""

    upstream: str
    model: str = DEFAULT_MODEL
    policy: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    ledger: Path | None = None


@dataclass(frozen=True)
class Pair:
    """An engine and a proxy that run and are ready."""

    engine_url: str
    proxy_url: str
    ledger: Path
    server: asyncio.Task[None] | None = None
    """The proxy's server when it runs in this process."""

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
            say(f"ready: http://{options.host}:{options.port}/v1, in front of {options.upstream} (Ctrl-C ends)")
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
        return asyncio.run(guarded())
    except (StartError, EngineError, ModelError, PolicyError, SettingsError, KeysError, LedgerError) as error:
        say(f"guard: {error}")
        return 1


@contextlib.asynccontextmanager
async def running_pair(options: ServeOptions) -> AsyncIterator[Pair]:
    """Engine and proxy, both ready. What can be refused is refused before the engine's slow start."""
    model = resolve_model(options.model)
    command = _engine_command(options, model)
    ledger = options.ledger or default_ledger()
    upstream = ProxyOptions(command.url, options.model, options.policy, options.host, options.port, ledger)
    with listening_socket(options.host, options.port) as listener:
        _need_free_port(options.engine_port)
        app = proxy_app(upstream)
        if options.model in SOURCES:
            await asyncio.to_thread(pull_with_progress, options.model)
        say(f"starting vLLM with {model.served_name}; its log: {command.log_file}")
        async with running_engine(command, say, tick_printer("starting vLLM")), serving(app, listener) as server:
            yield Pair(command.url, f"http://{_in_url(options.host)}:{options.port}", ledger, server)


@contextlib.asynccontextmanager
async def running_proxy(options: ProxyOptions) -> AsyncIterator[asyncio.Task[None]]:
    with listening_socket(options.host, options.port) as listener:
        async with serving(proxy_app(options), listener) as server:
            yield server


def default_ledger() -> Path:
    return state_folder() / "ledger.jsonl"


def proxy_app(options: ProxyOptions) -> FastAPI:
    """The proxy's application for these options; everything else is ``guard.settings``' own (environment, defaults)."""
    model = resolve_model(options.model)
    settings = load_settings(
        upstream=options.upstream,
        policy=options.policy or default_policy(),
        config_key=model.config_key,
        model_configs=data_folder("model_configs"),
        host=options.host,
        port=options.port,
        ledger=options.ledger or default_ledger(),
    )
    check_writable(settings.ledger)
    return create_app(settings)


def bound_policies(path: Path, config_key: str) -> PolicySet:
    """The policies with their detectors for one model. Raises ``PolicyError`` with file, line and field."""
    vectors = {vector.stem for vector in steering_folder(config_key).glob("*.safetensors")}
    return load_policies(
        path, lambda loaded: bind(loaded, build_detectors(loaded, config_key, data_folder("model_configs")), vectors)
    )


def engine_config_for(policies: Sequence[BoundPolicy], vectors_folder: Path) -> EngineConfig:
    """Taps for what the policies' detectors read and their rules steer, and for nothing else. Raises ``StartError``."""
    for policy in policies:
        if probes := {probe.probe for steering in policy.steerings.values() for probe in steering.probes.values()}:
            raise StartError(
                f"policy {policy.name} has a gate on {', '.join(sorted(probes))}, a probe of the engine; guard serve "
                "starts an engine without any: start vLLM with additional_config.mia.probes, and guard proxy before it"
            )
    steers = [steer for policy in policies for steer in policy.steers]
    hidden = [capture for policy in policies for capture in policy.spec.hidden.values()]
    attention = [capture for policy in policies for capture in policy.spec.attention.values()]
    vectors = {steer.vector for steer in steers}
    return EngineConfig(
        hidden_layers=tuple(sorted({capture.layer for capture in hidden})),
        attention_heads=tuple(sorted({head for one in attention for head in one.heads})),
        steering_layers=tuple(sorted({steer.layer for steer in steers})),
        steering_vectors=tuple(sorted(vectors)),
        steering_folder=vectors_folder if vectors else None,
    )


def _engine_command(options: ServeOptions, model: ResolvedModel) -> EngineCommand:
    policies = bound_policies(options.policy or default_policy(), model.config_key).policies
    return engine_command(
        model,
        engine_config_for(policies, steering_folder(model.config_key)),
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
