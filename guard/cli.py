"""The command ``guard``: reads options, calls one function, prints, sets the exit code. Owns no logic.

Everything that is not needed for ``--help`` is imported inside the commands, so that help appears at once.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from detectors.calibration.cli import calibrate
from detectors.calibration.data_cli import data_app
from detectors.calibration.eval_cli import evaluate
from guard.help_texts import (
    CALIBRATE_END,
    DEMO_END,
    DOCTOR_END,
    EVAL_END,
    EXIT_HELP,
    LIST_END,
    PROXY_HELP,
    PULL_END,
    SERVE_HELP,
    TAPS_END,
)
from guard.keys_cli import keys_app
from guard.ledger_cli import ledger_app
from guard.policy_cli import policy_app
from guard.steer_cli import steer_app

app = typer.Typer(
    help="A guardrail that reads the model: an OpenAI-compatible proxy for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Models by short name.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(policy_app, name="policy")
app.add_typer(keys_app, name="keys")
app.add_typer(ledger_app, name="ledger")
app.add_typer(data_app, name="data")
app.add_typer(steer_app, name="steer")
app.command(epilog=CALIBRATE_END)(calibrate)
app.command("eval", epilog=EVAL_END)(evaluate)

PRINTING = ("policy", "ledger")
"""Commands that print and talk to nobody."""

VLLM_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": False}

LISTENING, GUARDING, ACCESS, OTHER = "Listening", "Guarding", "Access and limits", "Other settings"

Model = Annotated[str, typer.Option(help="Short name (see: guard model list), folder, or Hugging Face name.")]
ProxyModel = Annotated[
    str | None,
    typer.Option(
        help="Model that vLLM serves, for its calibrations. Default: the setting config_key.", rich_help_panel=GUARDING
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(help="File of settings in YAML. Default: none.", rich_help_panel=OTHER),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        help="Policy file, or a folder with selection.yaml; shipped default if not given.",
        rich_help_panel=GUARDING,
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        help="Address of the proxy; other than loopback needs API keys. Default: 127.0.0.1.",
        rich_help_panel=LISTENING,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        help="Port that the proxy listens on. Default: 8080.",
        rich_help_panel=LISTENING,
    ),
]
EnginePort = Annotated[int, typer.Option(min=1, max=65535, help="Port that vLLM listens on, on loopback only.")]
Ledger = Annotated[
    Path | None,
    typer.Option(
        help="File that gets one JSON line for each request. Default: in the state folder.",
        rich_help_panel=GUARDING,
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(
        help="File of API keys, made by guard keys create. Without it no key is asked for.",
        rich_help_panel=ACCESS,
    ),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        help="Redis that counts limits for all replicas, as redis://HOST:6379/0. Default: each process for itself.",
        rich_help_panel=ACCESS,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes that the proxy runs in, on the same port; one uses at most one core. Default: 1.",
        rich_help_panel=LISTENING,
    ),
]
AdminPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        help="Port of the admin API, on loopback unless admin_host says otherwise. Default: none.",
        rich_help_panel=LISTENING,
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(help="Certificate in PEM: HTTPS. Default: none, HTTP.", rich_help_panel=LISTENING),
]
TlsKey = Annotated[Path | None, typer.Option(help="Its private key in PEM.", rich_help_panel=LISTENING)]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting of docs/api.md, without GUARD_ and in lower case; may be repeated.",
        rich_help_panel=OTHER,
    ),
]
Compiled = Annotated[bool, typer.Option("--compiled", help="Let vLLM compile the model: a slow start, faster answers.")]
DemoPort = Annotated[int, typer.Option(min=1, max=65535, help="Port that the proxy listens on.")]
DoctorPolicy = Annotated[
    Path | None,
    typer.Option(
        envvar="GUARD_POLICY", help="Policy file, or a folder with selection.yaml; shipped default if not given."
    ),
]
DoctorHost = Annotated[str, typer.Option(envvar="GUARD_HOST", help="Address that the proxy would listen on.")]
DoctorPort = Annotated[
    int, typer.Option(envvar="GUARD_PORT", min=1, max=65535, help="Port that the proxy would listen on.")
]


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in PRINTING:
        # What `| head` has cut off ends as with any other program, and not with a status that says something.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    app()


def _version(wanted: bool) -> None:
    if wanted:
        from guard import __version__

        typer.echo(f"guard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    pass


@app.command(context_settings=VLLM_ARGUMENTS, help=SERVE_HELP, epilog=EXIT_HELP)
def serve(
    context: typer.Context,
    model: Model = "smollm2-135m",
    policy: PolicyFile = None,
    host: Host = None,
    port: Port = None,
    engine_port: EnginePort = 8001,
    ledger: Ledger = None,
    compiled: Compiled = False,
    keys: Keys = None,
    redis_url: RedisUrl = None,
    workers: Workers = None,
    admin_port: AdminPort = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    config: Config = None,
    set_: Set = None,
) -> None:
    from guard.serve import ServeOptions, serve

    settings = _given(
        policy=policy,
        host=host,
        port=port,
        ledger=ledger,
        keys=keys,
        redis_url=redis_url,
        workers=workers,
        admin_port=admin_port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        config=config,
        set_=set_,
    )
    _exit(serve(ServeOptions(model, engine_port, compiled, tuple(context.args), settings)))


@app.command(help=PROXY_HELP, epilog=EXIT_HELP)
def proxy(
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL[,URL...]",
            help="Base URL of a vLLM server that has the plugin, for example http://gpu:8000; several serve the same "
            "model; empty: none. Default: http://127.0.0.1:8001.",
            rich_help_panel=GUARDING,
        ),
    ] = None,
    model: ProxyModel = None,
    policy: PolicyFile = None,
    host: Host = None,
    port: Port = None,
    ledger: Ledger = None,
    keys: Keys = None,
    redis_url: RedisUrl = None,
    workers: Workers = None,
    admin_port: AdminPort = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    config: Config = None,
    set_: Set = None,
) -> None:
    from guard.serve import ProxyOptions, serve_proxy

    settings = _given(
        upstream=upstream,
        policy=policy,
        host=host,
        port=port,
        ledger=ledger,
        keys=keys,
        redis_url=redis_url,
        workers=workers,
        admin_port=admin_port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        config=config,
        set_=set_,
    )
    _exit(serve_proxy(ProxyOptions(model, settings)))


@app.command(epilog=DEMO_END)
def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the requests instead of waiting for Ctrl-C.")] = False,
    port: DemoPort = 8080,
    engine_port: EnginePort = 8001,
) -> None:
    """Start both, send requests that are passed, flagged, steered and blocked, and show each verdict."""
    from guard.demo import demo

    _exit(demo(once=once, port=port, engine_port=engine_port))


@app.command(epilog=DOCTOR_END)
def doctor(
    model: Model = "smollm2-135m",
    policy: DoctorPolicy = None,
    host: DoctorHost = "127.0.0.1",
    port: DoctorPort = 8080,
    engine_port: EnginePort = 8001,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can run, what is wrong, and how to repair it; what a policy's taps take of its memory."""
    from guard.doctor import examine, has_failed, report
    from guard.terminal import print_checks

    checks = examine(host, port, engine_port, model, policy)
    if as_json:
        typer.echo(json.dumps(report(checks), indent=2))
    else:
        print_checks(checks)
    _exit(1 if has_failed(checks) else 0)


@app.command(epilog=TAPS_END)
def taps(
    model: Annotated[str, typer.Option(help="Short name, folder, or owner/name.")],
    policy: Annotated[Path, typer.Option(help="Policy file, or a folder of policies.")],
    probes: Annotated[Path, typer.Option(help="Folder for the probes that the engine is to compute; written.")],
    rerank: Annotated[bool, typer.Option("--rerank", help="Also what /v1/rerank reads.")] = False,
) -> None:
    """Print what a vLLM that you start yourself needs in --additional-config for a policy."""
    from guard.models import ModelError
    from guard.policy import PolicyError
    from guard.proxy_server import StartError
    from guard.serve import engine_config_of
    from guard.settings import SettingsError

    try:
        typer.echo(engine_config_of(model, policy, probes, rerank))
    except (ModelError, PolicyError, SettingsError, StartError) as error:
        _fail(str(error))


@model_app.command("pull", epilog=PULL_END)
def model_pull(
    name: Annotated[str, typer.Argument(help="Short name, see: guard model list.")],
    wheel: Annotated[Path | None, typer.Option(help="The wheel, fetched by other means.")] = None,
) -> None:
    """Download a model, check its hash, and convert it once into the cache."""
    from guard.models import ModelError
    from guard.terminal import pull_with_progress

    try:
        typer.echo(pull_with_progress(name, wheel))
    except ModelError as error:
        _fail(str(error))


@model_app.command("list", epilog=LIST_END)
def model_list() -> None:
    """Models that have a short name, and which of them are on this machine."""
    from guard.models import SOURCES, is_pulled, model_folder

    for source in SOURCES.values():
        where = model_folder(source) if is_pulled(source) else f"not pulled ({source.wheel_size_bytes // 1_000_000} MB)"
        typer.echo(f"{source.alias:<16} {source.name:<24} {source.licence:<12} {where}")


def _given(*, set_: list[str] | None, **named: object) -> dict[str, Any]:
    """The settings that options give, by name; the environment is read with the others (``guard.settings``), so that
    each option counts before it. Ends the command for a ``--set`` that is no assignment."""
    given = {name: value for name, value in named.items() if value is not None}
    for one in set_ or ():
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{one!r} is no NAME=VALUE", param_hint="--set")
        if name in given:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--set")
        given[name] = value
    return given


def _fail(message: str) -> NoReturn:
    typer.echo(f"guard: {message}", err=True)
    _exit(1)


def _exit(code: int) -> NoReturn:
    raise typer.Exit(code)
