"""The commands ``guard steer …``: read options, call one function each, print, set the exit code. Own no logic."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from detectors.calibration.cli import Model, model_folder, told_errors
from guard.finite import finite
from guard.help_texts import STEER_LEARN_END, STEER_LIST_END, STEER_SWEEP_END

steer_app = typer.Typer(
    help="Steering vectors: learn them from pairs of examples, try where and how strongly to add them, list them.",
    no_args_is_help=True,
)


class Method(enum.StrEnum):
    """How a vector is made of the pairs' differences."""

    diff = "diff"
    pca = "pca"


class At(enum.StrEnum):
    """Where the model is read."""

    last = "last"
    mean = "mean"


class Phase(enum.StrEnum):
    """At which tokens a vector acts."""

    prefill = "prefill"
    decode = "decode"
    both = "both"


Configs = Annotated[
    Path | None,
    typer.Option(
        "--configs",
        envvar="GUARD_MODEL_CONFIGS",
        help="Folder with steering/MODEL/NAME-LAYER.safetensors, as for guard serve. Default: the shipped one.",
    ),
]
Name = Annotated[str, typer.Argument(help="The vector's name; at a layer it is NAME-LAYER.", metavar="NAME")]
Force = Annotated[bool, typer.Option("--force", help="Replace files of another run.")]
Layers = Annotated[str | None, typer.Option(help="As in all, 8,12 or 8-12.")]


@steer_app.command("learn", epilog=STEER_LEARN_END)
def learn(
    name: Name,
    pairs: Annotated[
        Path,
        typer.Option(
            help='File of contrast pairs, one {"positive": ..., "negative": ...} a line; each side is what a user '
            "says, or a list of messages."
        ),
    ],
    model: Model = "smollm2-135m",
    method: Annotated[
        Method, typer.Option(help="diff: the mean of the differences; pca: their first principal direction.")
    ] = Method.diff,
    layers: Layers = None,
    at: Annotated[
        At,
        typer.Option(
            help="last: the state of the prompt's last token, where the answer begins; mean: the mean state over the "
            "last message, for pairs whose last messages differ."
        ),
    ] = At.last,
    configs: Configs = None,
    force: Force = False,
) -> None:
    """Learn a steering vector at each layer from pairs of examples, and write it where guard serve finds it.

    Six layers, evenly spaced, unless --layers says which. A run that was stopped goes on where it was. Vectors of this
    name from other pairs, or learnt in another way, are not replaced without --force.
    """
    from detectors.calibration.features import model_shape
    from detectors.calibration.progress import Reporter
    from guard.steering.job import LearnJob, check_vectors_replace_no_other, learn_vectors, write_vectors
    from guard.steering.rows import read_pairs
    from guard.steering.settings import parse_layers
    from guard.steering.vector_files import checked_name
    from guard.writable import check_writable

    with _told():
        read = read_pairs(pairs)
        folder, key = model_folder(model)
        chosen = parse_layers(layers, model_shape(folder).layers)
        options = ["--pairs", pairs.name, "--model", model, "--method", method.value, "--at", at.value]
        options += ["--layers", ",".join(map(str, chosen))]
        command = shlex.join(["guard", "steer", "learn", checked_name(name, chosen), *options])
        check_writable(_steering(configs, key))
        job = LearnJob(name, folder, key, read, chosen, method.value, at.value, command)
        if not force:
            check_vectors_replace_no_other(job, _steering(configs, key))
        with Reporter() as reporter:
            reporter.total(len(read.positive) + len(read.negative))
            learnt = learn_vectors(job, reporter.advance_to)
            paths = write_vectors(job, learnt, _steering(configs, key))
        for one, path in zip(learnt, paths, strict=True):
            typer.echo(
                f"layer {one.layer:>3}  length {one.norm:8.3f}, of the stream's {one.norm / one.stream_norm:6.1%}  "
                f"held-out pairs that agree {one.held_out:4.0%}  {path}"
            )


@steer_app.command("sweep", epilog=STEER_SWEEP_END)
def sweep(
    name: Name,
    prompts: Annotated[
        Path, typer.Option(help='File of prompts to answer, one {"prompt": ...} a line; a text or a list of messages.')
    ],
    measure: Annotated[
        str,
        typer.Option(
            help="The effect: language:fr, the share of function words of one language; pattern:REGEX, the share of "
            "answers in which it is found; words:YES|NO, how much likelier answers begin with the first than with the "
            "second; probe:FILE, the mean score of a calibrated probe."
        ),
    ],
    model: Model = "smollm2-135m",
    layers: Layers = None,
    coefficients: Annotated[
        str, typer.Option(help="With commas; 1 is the whole difference of the pairs.")
    ] = "0.5,1,1.5,2",
    phase: Annotated[Phase, typer.Option(help="At which tokens the vector acts.")] = Phase.both,
    max_tokens: Annotated[int, typer.Option(min=4, max=1024, help="Length of the answers.")] = 40,
    perplexity_factor: Annotated[
        float,
        typer.Option(
            min=1.0,
            callback=finite,
            help="Most that the answers' perplexity may grow, times the unsteered answers'.",
        ),
    ] = 3.0,
    out: Annotated[
        Path | None, typer.Option(help="File for all trials; the plot lies beside it. Default: NAME-sweep.json.")
    ] = None,
    configs: Configs = None,
    force: Force = False,
) -> None:
    """Try a vector at every layer it was learnt at with several coefficients, and recommend a setting.

    Of each setting are measured: the effect; the perplexity of the answers to the unsteered model; repetition.
    Recommended is the strongest effect that keeps to the limits of both. A run that was stopped goes on where it was;
    files of another sweep are not replaced without --force.
    """
    from detectors.calibration.progress import Reporter
    from guard.steering.job import SweepJob, sweep_settings
    from guard.steering.measures import make_measure
    from guard.steering.report import plot, table
    from guard.steering.rows import read_prompts
    from guard.steering.settings import SettingsError, chosen_layers, parse_coefficients
    from guard.steering.sweep import Sweep
    from guard.writable import check_writable, write_result

    with _told():
        read, effect, strengths = read_prompts(prompts), make_measure(measure), parse_coefficients(coefficients)
        folder, key = model_folder(model)
        vectors = _steering(configs, key)
        chosen = chosen_layers(vectors, name, layers)
        file = out or Path(f"{name}-sweep.json")
        picture = file.with_suffix(".svg")
        if picture == file:
            raise SettingsError("--out is the file of the trials; the plot beside it ends in .svg")
        check_writable(file.parent)
        options = ["--prompts", prompts.name, "--measure", measure, "--model", model, "--phase", phase.value]
        options += ["--layers", ",".join(map(str, chosen)), "--coefficients", coefficients]
        options += ["--max-tokens", str(max_tokens), "--perplexity-factor", f"{perplexity_factor:g}"]
        command = shlex.join(["guard", "steer", "sweep", name, *options])
        tried = Sweep(name, chosen, strengths, phase.value, max_tokens, read, effect, perplexity_factor)
        with Reporter() as reporter:
            reporter.total(1 + len(chosen) * len(strengths))
            job = SweepJob(tried, folder, key, vectors, file, picture, command, force)
            result = sweep_settings(job, reporter.advance_to)
            reporter.console.print(table(tried, result))
        write_result(picture, plot(tried, result).encode())
    typer.echo(f"wrote {file} and {picture}")
    if (best := result.recommended) is None:
        typer.echo("guard: no setting has more effect than none and keeps to the limits", err=True)
        raise typer.Exit(3)
    typer.echo(f"recommended: {tried.steer(best.layer, best.coefficient).model_dump_json(exclude_defaults=True)}")


@steer_app.command("list", epilog=STEER_LIST_END)
def list_(model: Model = "smollm2-135m", configs: Configs = None) -> None:
    """List a model's steering vectors: what they were learnt from, how, when, and at which layer."""
    from guard.models import ModelError, resolve_model
    from guard.steering.vector_files import vector_files

    try:
        folder = _steering(configs, resolve_model(model).config_key)
    except ModelError as error:
        typer.echo(f"guard: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{'vector':<24} {'layer':>5} {'length':>9}  {'date':<10}  made by")
    for one in vector_files(folder):
        if one.broken:
            typer.echo(f"{one.name:<24} cannot be read: {one.broken}")
            continue
        layer = "" if one.layer is None else str(one.layer)
        made = one.record.get("command") or one.record.get("method") or "unknown"
        typer.echo(f"{one.name:<24} {layer:>5} {one.norm:>9.3f}  {one.record.get('date', ''):<10}  {made}")


def _steering(configs: Path | None, key: str) -> Path:
    from guard.data import data_folder, steering_folder

    return steering_folder(configs or data_folder("model_configs"), key)


@contextmanager
def _told() -> Iterator[None]:
    """What a user can put right becomes one line and exit code 1."""
    with told_errors():
        from guard.steering.learning import LearningError
        from guard.steering.measures import MeasureError
        from guard.steering.rows import RowsError
        from guard.steering.settings import SettingsError
        from guard.steering.states import StatesError
        from guard.steering.vector_files import VectorNameError

        try:
            yield
        except (LearningError, MeasureError, RowsError, SettingsError, StatesError, VectorNameError) as error:
            typer.echo(f"guard: {error}", err=True)
            raise typer.Exit(1) from None
