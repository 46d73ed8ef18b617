"""The command ``guard``: reads options, calls one function, prints, sets the exit code. Owns no logic.

Everything that is not needed for ``--help`` is imported inside the commands, so that help appears at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from detectors.calibration.cli import calibrate
from guard.keys_cli import keys_app
from guard.policy_cli import policy_app

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
app.command()(calibrate)

VLLM_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": False}

Model = Annotated[str, typer.Option(help="Short name (see: guard model list), folder, or Hugging Face name.")]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="GUARD_POLICY",
        help="Policy file, or a folder with selection.yaml; shipped default if not given.",
    ),
]
Host = Annotated[
    str,
    typer.Option(envvar="GUARD_HOST", help="Address of the proxy; other than loopback needs API keys."),
]
Port = Annotated[int, typer.Option(envvar="GUARD_PORT", min=1, max=65535, help="Port that the proxy listens on.")]
EnginePort = Annotated[int, typer.Option(min=1, max=65535, help="Port that vLLM listens on, on loopback only.")]
Ledger = Annotated[
    Path | None, typer.Option(envvar="GUARD_LEDGER", help="File that gets one JSON line for each request.")
]
Compiled = Annotated[bool, typer.Option("--compiled", help="Let vLLM compile the model: a slow start, faster answers.")]


def main() -> None:
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


@app.command(context_settings=VLLM_ARGUMENTS)
def serve(
    context: typer.Context,
    model: Model = "smollm2-135m",
    policy: PolicyFile = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    engine_port: EnginePort = 8001,
    ledger: Ledger = None,
    compiled: Compiled = False,
) -> None:
    """Start vLLM and the proxy in front of it, until Ctrl-C. Arguments after -- go to vLLM."""
    from guard.serve import ServeOptions, serve

    _exit(serve(ServeOptions(model, policy, host, port, engine_port, ledger, compiled, tuple(context.args))))


@app.command()
def proxy(
    upstream: Annotated[
        str, typer.Option(help="Base URL of a vLLM server that has the plugin, for example http://gpu:8000.")
    ],
    model: Model = "smollm2-135m",
    policy: PolicyFile = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    ledger: Ledger = None,
) -> None:
    """Start the proxy alone, in front of an engine that runs elsewhere, until Ctrl-C."""
    from guard.serve import ProxyOptions, serve_proxy

    _exit(serve_proxy(ProxyOptions(upstream, model, policy, host, port, ledger)))


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the requests instead of waiting for Ctrl-C.")] = False,
    port: Port = 8080,
    engine_port: EnginePort = 8001,
) -> None:
    """Start both, send requests that are passed, flagged, steered and blocked, and show each verdict."""
    from guard.demo import demo

    _exit(demo(once=once, port=port, engine_port=engine_port))


@app.command()
def doctor(
    host: Host = "127.0.0.1",
    port: Port = 8080,
    engine_port: EnginePort = 8001,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can run and what is wrong. Exit code 1 when something must be repaired."""
    from guard.doctor import examine, has_failed, report
    from guard.terminal import print_checks

    checks = examine(host, port, engine_port)
    if as_json:
        typer.echo(json.dumps(report(checks), indent=2))
    else:
        print_checks(checks)
    _exit(1 if has_failed(checks) else 0)


@model_app.command("pull")
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


@model_app.command("list")
def model_list() -> None:
    """Models that have a short name, and which of them are on this machine."""
    from guard.models import SOURCES, is_pulled, model_folder

    for source in SOURCES.values():
        where = model_folder(source) if is_pulled(source) else f"not pulled ({source.wheel_size_bytes // 1_000_000} MB)"
        typer.echo(f"{source.alias:<16} {source.name:<24} {source.licence:<12} {where}")


def _fail(message: str) -> NoReturn:
    typer.echo(f"guard: {message}", err=True)
    _exit(1)


def _exit(code: int) -> NoReturn:
    raise typer.Exit(code)
