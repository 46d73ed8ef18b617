"""Thresholds from the user's own traffic: the scores that a ledger holds, taken as benign.

Owns which lines count and how thresholds come from them. The earlier two thirds of the lines set them, the later third
tries them, so that a change of traffic in between shows. Reads no text, since a ledger has none.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from detectors.calibration.metrics import (
    BUDGETS,
    Scores,
    check_budget,
    rows_needed,
    threshold,
    threshold_for_fpr,
)
from detectors.calibration.sources import DataError
from detectors.model_config import ModelConfigError, Threshold
from guard.telemetry.ledger_reader import Entry, LedgerReadError, entries

SHARE_THAT_SETS = 2 / 3


@dataclass(frozen=True)
class Traffic:
    """Scores of one detector in the order of the ledger. ``measured``: ``KIND@HASH`` of what gave them."""

    scores: Scores
    measured: str
    other_lines: int


def recalibrate(config: Path, ledger: Path, detector: str, budgets: Sequence[float] | None) -> Iterator[str]:
    """Rewrite the thresholds in ``config`` and tell what was done. ``balanced`` stays, since it needs attacks.

    Without ``budgets``, those of the named ones that the lines support; one that was asked for and that they do not
    support raises ``BudgetError``. Raises ``DataError`` and ``ModelConfigError``.
    """
    raw = _read_config(config)
    traffic = read_traffic(ledger, detector)
    count = int(len(traffic.scores) * SHARE_THAT_SETS)
    setting, trying = traffic.scores[:count], traffic.scores[count:]
    wanted = {name_of(budget): budget for budget in budgets} if budgets else dict(BUDGETS)
    if budgets:
        for budget in budgets:
            check_budget(count, budget)
    chosen = {name: budget for name, budget in wanted.items() if count >= rows_needed(budget)}
    if not chosen:
        check_budget(count, max(wanted.values()))
    yield f"{len(traffic.scores)} scores of {detector} ({traffic.measured}); {traffic.other_lines} other lines"
    for name in wanted.keys() - chosen.keys():
        yield f"{name}: left as it was, it needs {rows_needed(wanted[name])} scores to set and there are {count}"
    kept = raw["calibration"]["thresholds"]
    for name, budget in chosen.items():
        labels = np.zeros(len(setting), np.int64), np.zeros(len(trying), np.int64)
        value = threshold_for_fpr(setting, budget)
        point: Threshold = threshold(value, (setting, labels[0]), (trying, labels[1]))
        before = kept.get(name, {}).get("value")
        kept[name] = point.model_dump()
        low, high = point.held_out_fpr_interval.low, point.held_out_fpr_interval.high
        yield (
            f"{name}: {value:.4f}"
            + (f" (was {before:.4f})" if before is not None else "")
            + f"; set on {len(setting)}, "
            f"hit {point.held_out_false_positives} of the {len(trying)} later ones ({low:.2%} to {high:.2%})"
        )
    raw["calibration"]["choices"]["thresholds"] = (
        f"{', '.join(chosen)} set on {datetime.datetime.now(datetime.UTC).date().isoformat()} from "
        f"{len(traffic.scores)} scores in a ledger, by guard calibrate threshold; attacks caught are not known"
    )
    partial = config.with_suffix(".partial")
    partial.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(config)
    yield f"wrote {config}; a running guard reads it at its next reload or start"


def name_of(budget: float) -> str:
    """``fpr_1pct`` for 0.01, ``fpr_0_1pct`` for 0.001."""
    return f"fpr_{budget * 100:g}pct".replace(".", "_")


def read_traffic(ledger: Path, detector: str) -> Traffic:
    """The scores of ``detector`` under the last of its versions in the ledger, in all of its files. Raises
    ``DataError``."""
    found: list[tuple[str, float]] = []
    other = 0
    try:
        for entry in entries(ledger):
            one = None if entry is None else _score(entry, detector)
            if one is None:
                other += 1
            else:
                found.append(one)
    except LedgerReadError as error:
        raise DataError(str(error)) from None
    if not found:
        raise DataError(f"{ledger}: has no score of a detector {detector!r}")
    last = found[-1][0]
    scores = np.array([score for measured, score in found if measured == last])
    return Traffic(scores, last, other + len(found) - len(scores))


def _score(entry: Entry, detector: str) -> tuple[str, float] | None:
    """Of the prompt and of the answer the higher one: a request is hit once. Of a stream the ledger has the highest of
    all the times that it was judged, but lines of versions before have the first: they are left out."""
    try:
        answer = entry.get("answer") or {}
        if entry.get("streamed") and "complete" not in answer:
            answer = {}
        told = [
            (float(one["scores"][detector]), str(one.get("measured", {}).get(detector, "unknown")))
            for one in (entry, answer)
            if one.get("scores", {}).get(detector) is not None
        ]
        score, measured = max(told)
        return measured, score
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise ModelConfigError(f"{path}: is not JSON") from None
    if not isinstance(raw.get("calibration"), dict) or "thresholds" not in raw["calibration"]:
        raise ModelConfigError(f"{path}: has no calibration; run guard calibrate for the model first")
    return raw
