"""The command ``guard calibrate``: options in, files in ``model_configs`` out, and a table of what was measured.

Imports nothing heavy until it runs, so that it can be mounted in the command line at no cost.
"""

from __future__ import annotations

import enum
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from detectors.calibration.given_options import in_vain
from guard.finite import finite

if TYPE_CHECKING:
    from detectors.calibration.fitted import Fitted, Job
    from detectors.calibration.material import Request

DEFAULT_ROWS = 1600
"""Enough different benign validation rows for a budget of 1 %, and minutes on a CPU for a small model."""


class Kind(enum.StrEnum):
    """What can be calibrated."""

    attention_tracker = "attention_tracker"
    probe = "probe"
    text_baseline = "text_baseline"
    combination = "combination"
    tool_call_risk = "tool_call_risk"
    h_node = "h_node"
    science_hallucination = "science_hallucination"
    steering = "steering"
    threshold = "threshold"


OFFLINE = {"h_node", "science_hallucination"}
"""Kinds that read other conversations than those of ``--data``."""


TOGETHER = "probe text_baseline combination"
"""A combination is fitted to the scores of the other two."""


class Pooling(enum.StrEnum):
    """At which tokens the probe reads."""

    last_token = "last_token"  # noqa: S105
    mean = "mean"
    max = "max"
    best = "best"


Kinds = Annotated[
    list[Kind] | None,
    typer.Argument(
        help="What to calibrate; everything but threshold if not given. threshold: set thresholds anew from the scores "
        "in a ledger of your own benign traffic."
    ),
]
Model = Annotated[str, typer.Option(help="Short name (see: guard model list) or the model's folder.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Named set (see: guard data list), all, installed, or a file *.jsonl or *.csv of your own; may be given "
        "several times. Default: all."
    ),
]
Rows = Annotated[int, typer.Option(min=0, help="Most rows to read, drawn from the data; 0 for all.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Decides the split and every draw.")]
Url = Annotated[
    str | None, typer.Option(help="Read with the engine at this address (ends in /v1), which serves the same model.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="GUARD_UPSTREAM_API_KEY", help="Key for --url.")]


def calibrate(
    context: typer.Context,
    kinds: Kinds = None,
    model: Model = "smollm2-135m",
    data: Data = None,
    rows: Rows = DEFAULT_ROWS,
    out: Annotated[Path, typer.Option(help="Folder that gets KIND/MODEL.json.")] = Path("model_configs"),
    pooling: Annotated[
        Pooling,
        typer.Option(
            help="At which tokens the probe reads: the prompt's last; the mean over the data, or the highest of its "
            "tokens, for which the engine computes the whole prompt, prefix cache or not; or the best of the three."
        ),
    ] = Pooling.last_token,
    windows: Annotated[
        bool,
        typer.Option(
            "--windows",
            help="For probe alone: fit one that reads long data window by window too, with thresholds from long "
            "documents. Writes probe/MODEL-windows.json, which a policy names with config.",
        ),
    ] = False,
    seed: Seed = 0,
    url: Url = None,
    api_key: ApiKey = None,
    force: Annotated[
        bool, typer.Option("--force", help="For steering: replace a vector that was learnt otherwise.")
    ] = False,
    ledger: Annotated[Path | None, typer.Option(help="For threshold: the ledger to read scores from.")] = None,
    detector: Annotated[str, typer.Option(help="For threshold: the detector's name in the policy.")] = "injection",
    config: Annotated[Path | None, typer.Option(help="For threshold: the detector's file, which is rewritten.")] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(
            callback=finite,
            help="For threshold: share of benign requests that may be hit. Default: 0.001, 0.01 and 0.05.",
        ),
    ] = None,
) -> None:
    """Measure a model: choose heads and layers, fit, set thresholds, and write what its detectors need.

    A run that was stopped goes on where it was when it is started again. Detectors that are there are replaced; a
    steering vector that was learnt otherwise is not, without --force.
    """
    everything = [kind for kind in Kind if kind is not Kind.threshold and not (url and kind.value in OFFLINE)]
    chosen = tuple(kind.value for kind in (kinds or everything))
    if vain := list(in_vain(context, chosen)):
        typer.echo(f"guard: {'; '.join(vain)}", err=True)
        raise typer.Exit(2)
    with told_errors():
        if Kind.threshold.value in chosen:
            _threshold(chosen, ledger, detector, config, budget)
            return
        if windows and (chosen != (Kind.probe.value,) or pooling is not Pooling.last_token):
            typer.echo(
                "guard: --windows is for probe alone, at the last token: guard calibrate probe --windows", err=True
            )
            raise typer.Exit(2)
        names = tuple(data or ["all"])
        options = [*kinds_and(names, rows), "--model", model, "--seed", str(seed)]
        if windows:
            options.append("--windows")
        if pooling is not Pooling.last_token:
            options += ["--pooling", pooling.value]
        folder, key = model_folder(model)
        from detectors.calibration.fitted import Job
        from detectors.calibration.material import Request
        from guard.writable import check_writable

        if url is not None and (alone := OFFLINE & set(chosen)):
            typer.echo(f"guard: {', '.join(sorted(alone))}: read with an engine of their own, without --url", err=True)
            raise typer.Exit(2)
        for kind in chosen:
            check_writable(out / kind)
        job = Job(
            folder, key, model, chosen, seed, shlex.join(["guard", "calibrate", *chosen, *options]), pooling.value
        )
        if Kind.steering.value in chosen and not force:
            from detectors.calibration.steering import check_steering_replaces_no_other

            check_steering_replaces_no_other(job, out)
        with_token_states = pooling in (Pooling.max, Pooling.best) and bool({"probe", "combination"} & set(chosen))
        request = Request(
            folder, names, seed, rows or None, url=url, api_key=api_key, with_token_states=with_token_states
        )
        (_calibrate_windows if windows else _calibrate)(job, request, out)


def kinds_and(names: tuple[str, ...], rows: int) -> list[str]:
    """The options that say which rows."""
    return [*(word for name in names for word in ("--data", name)), "--rows", str(rows)]


def _calibrate(job: Job, request: Request, out: Path) -> None:
    from detectors.calibration import of_claims, of_references
    from detectors.calibration.fitted import write
    from detectors.calibration.material import gather
    from detectors.calibration.of_prompts import KINDS, fit_on_prompts
    from detectors.calibration.progress import Reporter
    from detectors.calibration.steering import calibrate_steering

    with Reporter() as reporter:
        fitted: dict[str, Fitted] = {}
        if set(KINDS) & set(job.kinds):
            asked = replace(request, kinds=tuple(kind for kind in job.kinds if kind in KINDS))
            material = gather(asked, reporter.say, reporter.total, reporter.advance_to)
            fitted |= fit_on_prompts(job, material.rows, material.features, reporter.say)
        for kind, fit, subjects in (
            (Kind.h_node, of_claims.fit_on_claims, of_claims.SUBJECTS),
            (Kind.science_hallucination, of_references.fit_on_references, of_references.SUBJECTS),
        ):
            if kind.value in job.kinds:
                some = subjects if request.most_rows is not None else None
                fitted[kind.value] = fit(job, some, reporter.say, reporter.total, reporter.advance_to)
        for path in write(fitted, job, out):
            reporter.say(f"wrote {path}")
        for kind_, one in fitted.items():
            reporter.show_quality(kind_, one.config)
        if {"probe", "text_baseline"} & set(fitted) and "combination" not in fitted:
            old = out / "combination" / f"{job.config_key}.json"
            if old.exists():
                reporter.say(
                    f"warning: {old} was fitted to what was there before; guard calibrate {TOGETHER} fits anew"
                )
        if Kind.steering.value in job.kinds:
            for path in calibrate_steering(job, out, reporter.say):
                reporter.say(f"wrote {path}")
        if set(KINDS) & set(fitted):
            reporter.say(f"to evaluate: {_evaluation(job, request, out)}")


def _calibrate_windows(job: Job, request: Request, out: Path) -> None:
    from detectors.calibration.fitted import write
    from detectors.calibration.of_windows import fit_with_windows, windows_key
    from detectors.calibration.progress import Reporter

    with Reporter() as reporter:
        fitted = fit_with_windows(job, request, reporter.say, reporter.total, reporter.advance_to)
        key = windows_key(job.config_key)
        for path in write({Kind.probe.value: fitted}, replace(job, config_key=key), out):
            reporter.say(f"wrote {path}")
        reporter.show_quality(Kind.probe.value, fitted.config)
        reporter.show_parts(fitted.config)
        reporter.say(f"a policy uses it with: {{kind: probe, config: {key}}}")
        reporter.say(f"to evaluate: {_evaluation(job, request, out)} --config {key}")


def _evaluation(job: Job, request: Request, out: Path) -> str:
    """The command that measures what was written."""
    at = ["--url", request.url] if request.url else []
    again = shlex.join([*kinds_and(request.data, request.most_rows or 0), "--model", job.model_id, *at])
    return f"guard eval --model-configs {shlex.quote(str(out))} {again} --seed {job.seed}"


def _threshold(
    kinds: tuple[str, ...], ledger: Path | None, detector: str, config: Path | None, budgets: list[float] | None
) -> None:
    from detectors.calibration.ledger_thresholds import recalibrate

    if len(kinds) > 1 or ledger is None or config is None:
        typer.echo("guard: threshold stands alone, and needs --ledger and --config", err=True)
        raise typer.Exit(2)
    for line in recalibrate(config, ledger, detector, budgets):
        typer.echo(line)


def model_folder(model: str) -> tuple[Path, str]:
    """The model's folder, and the stem of its files in ``model_configs``. Ends the command where there is none."""
    from guard.models import resolve_model

    resolved = resolve_model(model)
    folder = Path(resolved.path)
    if not (folder / "config.json").is_file():
        typer.echo(
            f"guard: no model at {folder}; run `guard model pull {model}` for a short name, "
            "or give the folder of a downloaded model",
            err=True,
        )
        raise typer.Exit(1)
    return folder, resolved.config_key


def _unwind(number: int, _frame: FrameType | None) -> NoReturn:
    """So that context managers and finalizers end the engine's processes, which outlive a parent that just stops."""
    raise SystemExit(128 + number)


@contextmanager
def told_errors() -> Iterator[None]:
    """What a user can put right becomes one line and exit code 1. Who is terminated ends what it has started."""
    signal.signal(signal.SIGTERM, _unwind)
    try:
        from detectors.calibration.feature_store import FeatureError
        from detectors.calibration.metrics import BudgetError
        from detectors.calibration.sources import DataError
        from detectors.model_config import ModelConfigError
        from guard.models import ModelError
        from guard.writable import NotWritableError

        try:
            yield
        except (BudgetError, DataError, FeatureError, ModelConfigError, ModelError, NotWritableError) as error:
            typer.echo(f"guard: {error}", err=True)
            raise typer.Exit(1) from None
    except ImportError as error:
        typer.echo(f"guard: {error}; calibration needs: pip install 'mia-guard[calibrate]' and vLLM", err=True)
        raise typer.Exit(1) from None
