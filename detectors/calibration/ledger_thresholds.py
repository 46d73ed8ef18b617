"""Thresholds from the user's own traffic: the scores that a ledger holds, taken as benign.

Owns which lines count and how thresholds come from them. The earlier two thirds of the lines set them, the later third
tries them, so that a change of traffic in between shows. Reads no text, since a ledger has none.
"""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from detectors.calibration.metrics import (
    BUDGETS,
    BudgetError,
    Scores,
    Tried,
    check_budget,
    rows_needed,
    threshold,
    threshold_for_fpr,
)
from detectors.calibration.sources import DataError
from detectors.model_config import ModelConfigError, Threshold, fingerprint_of
from detectors.numerals import numeral
from detectors.registry import BUILT_IN, UnknownDetectorError, build_detector
from guard.telemetry.ledger_reader import Entry, LedgerReadError, entries

SHARE_THAT_SETS = 2 / 3

SCORED = "scored"
"""What a ledger says of a detector with a score that is no lower bound."""

Fingerprints = Mapping[str, str | None]
"""Kind as which a file can be used -> fingerprint of what it computes; None of a kind that has none."""


@dataclass(frozen=True)
class Traffic:
    """Scores of one detector in the order of the ledger, one a request. ``measured``: ``KIND@HASH+FILE`` of what gave
    them. ``of_answers``: how many of them an answer has. ``left_out``: as ``measured``, of what was not counted."""

    scores: Scores
    measured: str
    of_answers: int
    left_out: Mapping[str, int]
    other_lines: int


def recalibrate(config: Path, ledger: Path, detector: str, budgets: Sequence[float] | None) -> Iterator[str]:
    """Rewrite the thresholds in ``config`` and tell what was done. ``balanced`` stays, since it needs attacks.

    Without ``budgets``, those of the named ones that the lines support; one that was asked for and that they do not
    support raises ``BudgetError``, as thresholds do that no policy could use. Raises ``DataError`` and
    ``ModelConfigError``.
    """
    raw = _read_config(config)
    traffic = read_traffic(ledger, detector, config)
    count = int(len(traffic.scores) * SHARE_THAT_SETS)
    setting, trying = traffic.scores[:count], traffic.scores[count:]
    wanted = {name_of(budget): budget for budget in budgets} if budgets else dict(BUDGETS)
    if budgets:
        for budget in budgets:
            check_budget(count, budget)
    chosen = {name: budget for name, budget in wanted.items() if count >= rows_needed(budget)}
    if not chosen:
        check_budget(count, max(wanted.values()))
    yield from _told(traffic, detector)
    for name in (name for name in wanted if name not in chosen):
        yield f"{name}: left as it was, it needs {rows_needed(wanted[name])} scores to set and there are {count}"
    kept, told = raw["calibration"]["thresholds"], list[str]()
    for name, budget in chosen.items():
        value = threshold_for_fpr(setting, budget)
        _check_reachable(name, value, setting)
        point: Threshold = threshold(value, _benign(setting), _benign(trying))
        before = kept.get(name, {}).get("value")
        kept[name] = point.model_copy(update={"scores_of": traffic.measured.partition("+")[2]}).model_dump()
        low, high = point.held_out_fpr_interval.low, point.held_out_fpr_interval.high
        told.append(
            f"{name}: {numeral(value)}"
            + (f" (was {numeral(before, value)})" if before is not None else "")
            + f"; set on {len(setting)}, "
            f"hit {point.held_out_false_positives} of the {len(trying)} later ones ({low:.2%} to {high:.2%})"
        )
    _check_order(config, {name: float(point["value"]) for name, point in kept.items()}, chosen)
    raw["calibration"]["choices"]["thresholds"] = (
        f"{', '.join(chosen)} set on {datetime.datetime.now(datetime.UTC).date().isoformat()} from "
        f"{len(traffic.scores)} scores in a ledger, by guard calibrate threshold; attacks caught are not known"
    )
    _write(config, raw, traffic.measured.partition("@")[0])
    yield from told
    yield f"wrote {config}; a running guard reads it at its next reload or start"


def _benign(scores: Scores) -> Tried:
    return Tried(scores, np.zeros(len(scores), np.int64))


def _told(traffic: Traffic, detector: str) -> Iterator[str]:
    answers = f", {traffic.of_answers} of answers" if traffic.of_answers else ""
    yield f"{len(traffic.scores)} scores of {detector} ({traffic.measured}{answers}); {traffic.other_lines} other lines"
    if traffic.left_out:
        yield f"left out, measured otherwise: {_counted(traffic.left_out)}"
    yield (
        f"each line counts as a request of its own, and they have {len(np.unique(traffic.scores))} different scores: "
        "a ledger has no texts, so one request many times cannot be told from many"
    )


def _check_reachable(name: str, value: float, scores: Scores) -> None:
    """Scores of our kinds lie between 0 and 1; none reaches what lies just above 1."""
    highest = float(scores.max())
    if value > 1.0 >= highest:
        raise BudgetError(
            f"{name}: no threshold separates: {int((scores == highest).sum())} of {len(scores)} scores are "
            f"{highest:g}, and a score cannot be higher; nothing is written"
        )


def _check_order(config: Path, values: Mapping[str, float], chosen: Mapping[str, float]) -> None:
    """A smaller budget has the higher threshold, also where only one of two was set: policies use the range between."""
    ordered = sorted((budget, name) for name in values if (budget := budget_of(name)) is not None)
    for (budget, strict), (_, loose) in pairwise(ordered):
        if values[strict] > values[loose]:
            continue
        high, low = numeral(values[strict], values[loose]), numeral(values[loose], values[strict])
        would = f"{config}: not written: {strict} would be {high} and {loose} {low}"
        if strict in chosen and loose in chosen:
            raise BudgetError(f"{would}: too many scores are the same to tell them apart")
        stays = loose if strict in chosen else strict
        needed = math.ceil(rows_needed(min(budget, *chosen.values())) / SHARE_THAT_SETS)
        raise BudgetError(
            f"{would}, since {stays} rests on other data and was not set: a policy with both would not load. "
            f"Give a ledger of at least {needed} scores, which sets both, or set both with --budget"
        )


def _write(config: Path, raw: Mapping[str, Any], kind: str) -> None:
    """In one step, and only what the detector can be built from. Raises ``ModelConfigError``."""
    partial = config.with_name(f".{config.stem}.partial.json")
    try:
        partial.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        build_detector(kind, partial)
        partial.replace(config)
    except OSError as error:
        raise ModelConfigError(f"{config}: cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


def name_of(budget: float) -> str:
    """``fpr_1pct`` for 0.01, ``fpr_0_1pct`` for 0.001."""
    return f"fpr_{budget * 100:g}pct".replace(".", "_")


def budget_of(name: str) -> float | None:
    """The other way; None for the name of another threshold."""
    try:
        return float(name.removeprefix("fpr_").removesuffix("pct").replace("_", ".")) / 100
    except ValueError:
        return None


def read_traffic(ledger: Path, detector: str, config: Path) -> Traffic:
    """The scores of ``detector`` in all of the ledger's files that ``config`` gave, under the last of the policy's
    versions that used it. Of a request whose prompt and answer both have one, the higher, which decides whether it is
    hit. Raises ``DataError`` and ``ModelConfigError``."""
    found: list[dict[str, tuple[float, bool]]] = []
    other = 0
    try:
        for entry in entries(ledger):
            if one := _scores(entry, detector) if entry is not None else None:
                found.append(one)
            else:
                other += 1
    except LedgerReadError as error:
        raise DataError(str(error)) from None
    if not found:
        raise DataError(f"{ledger}: has no score of a detector {detector!r}")
    counts = Counter(measured for one in found for measured in one)
    fingerprints = fingerprints_of(config, {measured.partition("@")[0] for measured in counts})
    ours = [measured for one in found for measured in one if _is_of(measured, fingerprints)]
    if not ours:
        own = " or ".join(f"{kind}@…+{file}" if file else kind for kind, file in fingerprints.items())
        raise DataError(
            f"{ledger}: no score of {detector!r} was given by {config}, which is {own}; they are of {_counted(counts)} "
            "(KIND@POLICY+CALIBRATION, the last missing in lines of older versions). Nothing is written"
        )
    last = ours[-1]
    counted = [one[last] for one in found if last in one]
    return Traffic(
        np.array([score for score, _ in counted]),
        last,
        sum(of_answer for _, of_answer in counted),
        {measured: count for measured, count in counts.items() if measured != last},
        other,
    )


def fingerprints_of(config: Path, kinds: set[str]) -> Fingerprints:
    """Of the kinds, ours and ``kinds``, that a detector can be built as from this file; the kind that its folder is
    named after alone where that is one. Raises ``ModelConfigError`` where there is none."""
    built: dict[str, str | None] = {}
    reasons: dict[str, str] = {}
    for kind in sorted({*BUILT_IN, *kinds}):
        try:
            built[kind] = fingerprint_of(build_detector(kind, config))
        except (ModelConfigError, UnknownDetectorError) as error:
            reasons[kind] = str(error)
    named = config.absolute().parent.name
    if named in built:
        return {named: built[named]}
    if not built:
        raise ModelConfigError(reasons.get(named) or f"{config}: is no calibration of a detector: {reasons['probe']}")
    return built


def _is_of(measured: str, fingerprints: Fingerprints) -> bool:
    kind, _, rest = measured.partition("@")
    return kind in fingerprints and fingerprints[kind] == (rest.partition("+")[2] or None)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{measured} ({count})" for measured, count in counts.items())


def _scores(entry: Entry, detector: str) -> dict[str, tuple[float, bool]]:
    """By what measured it, the score of a request and whether its answer has it: of both the higher, since a request is
    hit once. One that is *at least* so high is none. Of a stream the ledger has the highest of all the times that it
    was judged, but lines of versions before have the first: they are left out."""
    found: dict[str, tuple[float, bool]] = {}
    answer = entry.get("answer")
    if not isinstance(answer, dict) or (entry.get("streamed") and "complete" not in answer):
        answer = {}
    parts: tuple[tuple[Any, bool], ...] = ((entry, False), (answer, True))
    for part, of_answer in parts:
        try:
            score, measured = part["scores"].get(detector), str(part["measured"].get(detector, "unknown"))
            # One with a reason may be higher than it is.
            whole = part.get("detectors", {}).get(detector, SCORED) == SCORED
            if whole and score is not None and math.isfinite(number := float(score)):
                found[measured] = max(found.get(measured, (-math.inf, False)), (number, of_answer))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            continue
    return found


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelConfigError(f"{path}: is not JSON") from None
    if (
        not isinstance(raw, dict)
        or not isinstance(raw.get("calibration"), dict)
        or "thresholds" not in raw["calibration"]
    ):
        raise ModelConfigError(f"{path}: has no calibration; run guard calibrate for the model first")
    return raw
