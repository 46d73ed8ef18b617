"""Rows' windows as rows of their own, for detectors that have the model read long data once more.

Owns which these are, so that they are read and kept as all rows are, and one score from those of a row and its windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from detectors.calibration.metrics import Scores
from detectors.calibration.rows import Row
from detectors.windows import Windows, passes_of


@dataclass(frozen=True)
class WindowRows:
    """``rows``: the windows as conversations. ``of``: which of these are a row's, by the row's number. ``cut_off``: how
    many rows have more windows than are read."""

    rows: tuple[Row, ...]
    of: dict[int, tuple[int, ...]]
    cut_off: int

    def highest(self, index: npt.NDArray[np.int64], scores: Scores, of_windows: Scores) -> Scores:
        """Of the rows with the numbers ``index`` and the scores ``scores``: with those of their windows."""
        return np.array(
            [
                max([score, *(of_windows[at] for at in self.of.get(int(i), ()))])
                for i, score in zip(index, scores, strict=True)
            ],
            np.float64,
        )


def window_rows(rows: Sequence[Row], index: Sequence[int], windows: Windows) -> WindowRows:
    """Of the rows with the numbers ``index``."""
    found: list[Row] = []
    of: dict[int, tuple[int, ...]] = {}
    cut_off = 0
    for i in index:
        passes, more = passes_of(rows[i].messages, windows)
        of[i] = tuple(range(len(found), len(found) + len(passes)))
        found += [
            replace(rows[i], id=f"{rows[i].id}-window-{n}", text=messages[-1]["content"], messages=messages)
            for n, messages in enumerate(passes)
        ]
        cut_off += more
    return WindowRows(tuple(found), of, cut_off)
