"""From what a user asks for to rows with what the model computes on them, for calibrating and evaluating alike.

Owns the order: names and files are checked, then lengths, and only then an engine starts, if rows are still unread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from detectors.base import WindowDetector
from detectors.calibration.as_read import AsRead, captures_of, lacking_taps, reads_beyond
from detectors.calibration.captures import Extra
from detectors.calibration.data import Use, knows_tool_role, load_rows, short_enough, template_of
from detectors.calibration.data_lengths import data_tokens
from detectors.calibration.demands import lacking, readable, told
from detectors.calibration.feature_store import FeatureStore, Plan
from detectors.calibration.features import (
    Features,
    Reader,
    evenly_spaced,
    full_plan,
    model_shape,
    most_tokens,
    read_features,
    unread,
)
from detectors.calibration.positions import position_rows
from detectors.calibration.readers import Served, http_reader, offline_reader, served_engine
from detectors.calibration.rows import Row
from detectors.calibration.sources import DataError
from detectors.calibration.token_states import TOKEN_LAYERS, TokenStore
from detectors.calibration.window_rows import WindowRows, window_rows
from guard.model_weights import weights_sha256

TEXT_ALONE = ("text_baseline",)
"""What is fitted and measured without anything that the model computes."""


@dataclass(frozen=True)
class Request:
    """``model``: its folder. ``data``: sets and files. ``most_rows``: of these; None for all. ``url``: an engine that
    runs, with the same model; None to start one."""

    model: Path
    data: tuple[str, ...]
    seed: int
    most_rows: int | None = None
    use: Use = Use.fit
    with_positions: bool = False
    kinds: tuple[str, ...] = ()
    """Of detectors that the rows are for, which may not be able to read all of them."""
    url: str | None = None
    api_key: str | None = None
    with_token_states: bool = False
    """Whether to read the state of every token of the data."""
    detectors: Mapping[str, Any] = field(default_factory=dict)
    """By kind, those to be measured: what one reads that is not kept of rows is read of held-out ones for it."""


@dataclass(frozen=True)
class Material:
    """``as_read``: by kind, of detectors that read what is not kept of rows, their scores. ``windows``: by kind, of
    detectors with windows, those of held-out rows, and what was read of them."""

    rows: Sequence[Row]
    features: Features
    as_read: Mapping[str, AsRead] = field(default_factory=dict)
    windows: Mapping[str, tuple[WindowRows, Features]] = field(default_factory=dict)


def gather(
    request: Request,
    say: Callable[[str], None] = lambda _: None,
    total: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] | None = None,
) -> Material:
    """Raises ``DataError`` before any engine time is spent, ``FeatureError`` when the engine gives no readout."""
    tokenizer = template_of(request.model)
    tool_role = knows_tool_role(tokenizer)
    rows = load_rows(request.data, request.seed, request.most_rows, tool_role, say, request.use)
    check_demands(request.kinds, rows, say)
    if request.with_positions:
        rows += position_rows(request.seed, tool_role)
    rows = short_enough(rows, tokenizer, most_tokens(request.model), say)
    if tuple(request.detectors or request.kinds) == TEXT_ALONE:
        return Material(rows, _unread(request, rows, tokenizer))
    say(f"reading {len(rows)} conversations with the model")
    return _read(request, engine_of(request, say), rows, say, total, progress)


@dataclass(frozen=True)
class Engine:
    """What reads: one that is still to be started, or ``served``, which runs. ``plan``: all that it can read;
    ``model_key``: for ``FeatureStore``."""

    plan: Plan
    model_key: str
    served: Served | None = None


def engine_of(request: Request, say: Callable[[str], None]) -> Engine:
    """Starts none. Raises ``FeatureError``."""
    shape, weights = model_shape(request.model), weights_sha256(request.model)
    if request.url is None:
        return Engine(full_plan(shape), weights)
    served = served_engine(request.url, request.api_key)
    served.check_shape(shape)
    say(f"the engine serves {served.name}" + (f" in {served.dtype}" if served.dtype else ""))
    return Engine(served.plan, served.kept_under(weights), served)


def reader_of(
    request: Request, engine: Engine, plan: Plan, extras: Sequence[Extra], say: Callable[[str], None]
) -> AbstractContextManager[Reader]:
    """For ``plan``, which is a part of the engine's."""
    if request.url is not None and engine.served is not None:
        return http_reader(request.url, request.api_key, engine.served)
    say("starting an engine")
    return offline_reader(request.model, plan, extras)


def _read(
    request: Request,
    engine: Engine,
    rows: Sequence[Row],
    say: Callable[[str], None],
    total: Callable[[int], None],
    progress: Callable[[int], None] | None,
) -> Material:
    plan, model_key = engine.plan, engine.model_key
    as_read = {
        kind: AsRead(
            kind,
            detector,
            model_key,
            partial(_measured, kind),
            "" if engine.served is None else lacking_taps(captures_of(detector), plan),
        )
        for kind, detector in request.detectors.items()
        if reads_beyond(detector, plan)
    }
    tokens = _token_store(plan, model_key) if request.with_token_states else None
    extras: list[Extra] = [*as_read.values(), *([tokens] if tokens else [])]
    windows = {kind: found for kind, one in request.detectors.items() if (found := _windows_of(kind, one, rows))}
    everything = [*rows, *(row for found in windows.values() for row in found.rows)]
    if len(everything) > len(rows):
        say(f"reading {len(everything) - len(rows)} windows of long rows too")
    total(len(everything))
    store = FeatureStore(model_key, plan)
    read = read_features(everything, store, lambda: reader_of(request, engine, plan, extras, say), progress, extras)
    features = read.part(slice(0, len(rows)))
    if tokens is not None:
        features = replace(features, token_states=tokens.states(rows))
    begin, parts = len(rows), {}
    for kind, found in windows.items():
        parts[kind] = (found, read.part(slice(begin, begin + len(found.rows))))
        begin += len(found.rows)
    return Material(rows, features, as_read, parts)


def _unread(request: Request, rows: Sequence[Row], tokenizer: Any) -> Features:
    """Of rows that are to be measured, how long their data is."""
    features = unread(len(rows))
    at = [i for i, row in enumerate(rows) if request.detectors and row.split == "held_out"]
    features.tokens[at] = data_tokens([rows[i] for i in at], tokenizer)
    return features


def _windows_of(kind: str, detector: Any, rows: Sequence[Row]) -> WindowRows | None:
    """Of held-out rows; None of a detector that has none."""
    if not isinstance(detector, WindowDetector) or detector.windows is None:
        return None
    return window_rows(rows, [i for i, row in enumerate(rows) if _measured(kind, row)], detector.windows)


def _token_store(plan: Plan, model_key: str) -> TokenStore:
    if not plan.window_layers:
        raise DataError(
            "the engine's max_hidden_rows_per_step is too small for the states of every token, which a probe of the "
            "highest needs; start it with more, or calibrate without --url"
        )
    return TokenStore(model_key, evenly_spaced(plan.window_layers, min(TOKEN_LAYERS, len(plan.window_layers))))


def _measured(kind: str, row: Row) -> bool:
    return row.split == "held_out" and bool(readable(kind, [row]))


def check_demands(kinds: Sequence[str], rows: Sequence[Row], say: Callable[[str], None]) -> None:
    """Say which rows a kind cannot read. Raises ``DataError`` when the rows suffice for none of ``kinds``."""
    why = {kind: lacking(kind, rows) for kind in kinds}
    if kinds and all(why.values()):
        raise DataError("; ".join(f"{kind}: {reason}" for kind, reason in why.items()))
    for line in (told(kind, rows) for kind in kinds if not why[kind]):
        if line:
            say(line)
