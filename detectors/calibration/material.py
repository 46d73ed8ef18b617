"""From what a user asks for to rows with what the model computes on them, for calibrating and evaluating alike.

Owns the order: names and files are checked, then lengths, and only then an engine starts, if rows are still unread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from detectors.calibration.data import check_lengths, knows_tool_role, load_rows, template_of
from detectors.calibration.demands import lacking, told
from detectors.calibration.feature_store import FeatureStore
from detectors.calibration.features import Features, Reader, full_plan, model_shape, read_features
from detectors.calibration.positions import position_rows
from detectors.calibration.readers import MAX_MODEL_LEN, http_reader, offline_reader, served_engine
from detectors.calibration.rows import Row
from detectors.calibration.sources import DataError
from guard.model_weights import weights_sha256


@dataclass(frozen=True)
class Request:
    """``model``: its folder. ``data``: sets and files. ``most_rows``: of these; None for all. ``url``: an engine that
    runs, with the same model; None to start one."""

    model: Path
    data: tuple[str, ...]
    seed: int
    most_rows: int | None = None
    with_positions: bool = False
    kinds: tuple[str, ...] = ()
    """Of detectors that the rows are for, which may not be able to read all of them."""
    url: str | None = None
    api_key: str | None = None


@dataclass(frozen=True)
class Material:
    rows: Sequence[Row]
    features: Features


def gather(
    request: Request,
    say: Callable[[str], None] = lambda _: None,
    total: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] | None = None,
) -> Material:
    """Raises ``DataError`` before any engine time is spent, ``FeatureError`` when the engine gives no readout."""
    tokenizer = template_of(request.model)
    tool_role = knows_tool_role(tokenizer)
    rows = load_rows(request.data, request.seed, request.most_rows, tool_role, say)
    check_demands(request.kinds, rows, say)
    if request.with_positions:
        rows += position_rows(request.seed, tool_role)
    check_lengths(rows, tokenizer, MAX_MODEL_LEN)
    total(len(rows))
    say(f"reading {len(rows)} conversations with the model")
    shape, weights = model_shape(request.model), weights_sha256(request.model)
    if request.url is not None:
        url, key, served = request.url, request.api_key, served_engine(request.url, request.api_key)
        served.check_shape(shape)
        say(f"the engine serves {served.name}" + (f" in {served.dtype}" if served.dtype else ""))
        store = FeatureStore(served.kept_under(weights), served.plan)
        return Material(rows, read_features(rows, store, lambda: http_reader(url, key, served), progress))
    plan = full_plan(shape)

    def reader() -> AbstractContextManager[Reader]:
        say("starting an engine")
        return offline_reader(request.model, plan)

    return Material(rows, read_features(rows, FeatureStore(weights, plan), reader, progress))


def check_demands(kinds: Sequence[str], rows: Sequence[Row], say: Callable[[str], None]) -> None:
    """Say which rows a kind cannot read. Raises ``DataError`` when the rows suffice for none of ``kinds``."""
    why = {kind: lacking(kind, rows) for kind in kinds}
    if kinds and all(why.values()):
        raise DataError("; ".join(f"{kind}: {reason}" for kind, reason in why.items()))
    for line in (told(kind, rows) for kind in kinds if not why[kind]):
        if line:
            say(line)
