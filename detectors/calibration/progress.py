"""What calibration shows while it works: steps as they start, a bar while the model reads, tables at the end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from detectors.calibration.evaluation import Measured
from detectors.calibration.metrics import left_out
from detectors.model_config import Interval, ModelConfig, Quality
from detectors.numerals import numeral


class Reporter:
    def __init__(self) -> None:
        self.console = Console()
        self.bar = Progress(
            TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=self.console
        )
        self.task = self.bar.add_task("reading", total=None, visible=False)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, message: str) -> None:
        """A line as it is, never broken: a path or a command that it names can be copied."""
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def total(self, rows: int) -> None:
        self.bar.update(self.task, total=rows, visible=True)

    def advance_to(self, done: int) -> None:
        self.bar.update(self.task, completed=done)

    def show_pooled(self, measured: Mapping[str, Measured]) -> None:
        table = Table("held-out rows", "benign", "attack", "AUROC [95 %]", "TPR at 1 % FPR [95 %]")
        for name, one in measured.items():
            (low, high), (least, most) = one.auroc_interval, one.tpr_1pct_interval
            table.add_row(
                name,
                str(one.benign),
                str(one.attack),
                f"{one.auroc:.3f} [{low:.3f}, {high:.3f}]",
                f"{one.tpr_1pct:.2f} [{least:.2f}, {most:.2f}]",
            )
        self.console.print(table)

    def show_quality(self, kind: str, config: ModelConfig) -> None:
        if config.calibration is None:
            return
        table = Table("held-out rows", "benign", "attack", "AUROC [95 %]", "AUPRC", "TPR at 1 % FPR [95 %]")
        for name, measured in ((kind, config.calibration.quality), ("text baseline", config.calibration.text_baseline)):
            table.add_row(name, *_cells(measured))
        self.console.print(table)
        thresholds = config.calibration.thresholds
        benign, of = "false positives [95 %]", "attacks caught [95 %]"
        points = Table(f"{kind}: threshold", "at least", "set on benign rows", benign, of)
        for name, point in thresholds.items():
            points.add_row(
                name,
                numeral(point.value),
                _different(point.validation_benign, point.validation_benign_groups),
                f"{point.held_out_false_positives} of "
                + _different(point.held_out_benign, point.held_out_benign_groups)
                + _shares(point.held_out_fpr_interval, point.held_out_fpr),
                f"{point.held_out_true_positives} of {point.held_out_attack}"
                + _shares(point.held_out_tpr_interval, point.held_out_tpr),
            )
        self.console.print(points)
        for name, why in left_out(thresholds).items():
            self.say(f"{kind}: no {name}: {why}; a policy that uses {name} does not load")

    def show_parts(self, config: ModelConfig) -> None:
        """How many of which rows reach each threshold."""
        if config.calibration is None or not config.calibration.parts:
            return
        names = list(config.calibration.thresholds)
        table = Table("as served, with windows", "rows", *names)
        for part, one in config.calibration.parts.items():
            cells = (f"{one.hits[name]}{_shares(one.intervals[name])}" for name in names)
            table.add_row(part, _different(one.rows, one.different), *cells)
        self.console.print(table)


def _cells(measured: Quality) -> tuple[str, ...]:
    auroc, tpr = measured.auroc_interval, measured.tpr_at_fpr_1pct_interval
    return (
        str(measured.benign),
        str(measured.attack),
        f"{measured.auroc:.3f} [{auroc.low:.3f}, {auroc.high:.3f}]",
        f"{measured.auprc:.3f}",
        f"{measured.tpr_at_fpr_1pct:.2f} [{tpr.low:.2f}, {tpr.high:.2f}]",
    )


def _different(rows: int, groups: int | None) -> str:
    return str(rows) if groups in (None, rows) else f"{rows} ({groups} different)"


def _shares(interval: Interval | None, share: float | None = None) -> str:
    """share: what the interval is of, which counts rows that are nearly the same as one."""
    if interval is None:
        return ""
    return ("" if share is None else f", {share:.1%}") + f" [{interval.low:.1%}, {interval.high:.1%}]"
