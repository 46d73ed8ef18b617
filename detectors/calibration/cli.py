"""The command ``guard calibrate``: options in, files in ``model_configs`` out, and a table of what was measured.

Imports nothing heavy until it runs, so that it can be mounted in the command line at no cost.
"""

from __future__ import annotations

import enum
import shlex
from pathlib import Path
from typing import Annotated

import typer


class Kind(enum.StrEnum):
    """What can be calibrated."""

    attention_tracker = "attention_tracker"
    probe = "probe"
    steering = "steering"


def calibrate(
    kinds: Annotated[list[Kind] | None, typer.Argument(help="What to calibrate; everything if not given.")] = None,
    model: Annotated[str, typer.Option(help="Short name (see: guard model list) or the model's folder.")] = (
        "smollm2-135m"
    ),
    out: Annotated[Path, typer.Option(help="Folder that gets KIND/MODEL.json.")] = Path("model_configs"),
    seed: Annotated[int, typer.Option(help="Decides the split and every draw.")] = 0,
) -> None:
    """Measure a model: choose heads and layers, fit, set thresholds, and write what its detectors need."""
    from detectors.calibration.features import FeatureError
    from detectors.calibration.sources import DataError
    from guard.models import ModelError

    chosen = tuple(kind.value for kind in (kinds or list(Kind)))
    try:
        _calibrate(chosen, model, out, seed)
    except (DataError, FeatureError, ModelError) as error:
        typer.echo(f"guard: {error}", err=True)
        raise typer.Exit(1) from None
    except ImportError as error:
        typer.echo(f"guard: {error}; calibration needs: pip install 'mia-guard[calibrate]' and vLLM", err=True)
        raise typer.Exit(1) from None


def _calibrate(kinds: tuple[str, ...], model: str, out: Path, seed: int) -> None:
    from detectors.calibration.progress import Reporter
    from detectors.calibration.rows import default_rows
    from detectors.calibration.run import Job, calibrate_detectors, write
    from detectors.calibration.steering import calibrate_steering
    from guard.models import resolve_model

    resolved = resolve_model(model)
    folder = _model_folder(resolved.path, model)
    command = shlex.join(["guard", "calibrate", *kinds, "--model", model, "--seed", str(seed)])
    job = Job(folder, resolved.config_key, model, kinds, seed, command)
    with Reporter() as reporter:
        if detectors := tuple(kind for kind in kinds if kind != Kind.steering.value):
            rows = default_rows(seed)
            reporter.total(len(rows))
            result = calibrate_detectors(job, rows, reporter.say, reporter.advance_to)
            for path in write(result, job, out):
                reporter.say(f"wrote {path}")
            for kind in detectors:
                reporter.show_quality(kind, result.configs[kind])
        if Kind.steering.value in kinds:
            for path in calibrate_steering(job, out, reporter.say):
                reporter.say(f"wrote {path}")


def _model_folder(path: str, name: str) -> Path:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        typer.echo(
            f"guard: no model at {folder}; run `guard model pull {name}` for a short name, "
            "or give the folder of a downloaded model",
            err=True,
        )
        raise typer.Exit(1)
    return folder
