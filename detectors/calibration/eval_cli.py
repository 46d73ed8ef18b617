"""The command ``guard eval``: how good a model's detectors are on rows that nothing was fitted to.

Imports nothing heavy until it runs.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detectors.calibration.cli import (
    OFFLINE,
    ApiKey,
    Data,
    Model,
    Rows,
    Seed,
    Url,
    kinds_and,
    model_folder,
    told_errors,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from detectors.calibration.evaluation import DetectorReport
    from detectors.calibration.features import Features
    from detectors.calibration.material import Material, Request
    from detectors.calibration.progress import Reporter
    from detectors.calibration.rows import Row

DETECTORS = ("probe", "attention_tracker", "text_baseline", "combination", "tool_call_risk")
"""In the order in which they are scored: the combination comes behind its inputs."""


def evaluate(
    model: Model = "smollm2-135m",
    configs: Annotated[
        Path | None, typer.Option("--model-configs", help="Folder with KIND/MODEL.json. Default: those that ship.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="Measure KIND/NAME.json in place of KIND/MODEL.json, such as SmolLM2-135M-Instruct-windows; as config "
            "in a policy."
        ),
    ] = None,
    data: Data = None,
    rows: Rows = 0,
    out: Annotated[Path, typer.Option(help="Folder that gets report.html and report.json.")] = Path("evaluation"),
    seed: Seed = 0,
    leave_one_out: Annotated[
        bool, typer.Option(help="Also fit anew with each set left out in turn, and measure on it.")
    ] = True,
    all_rows: Annotated[
        bool,
        typer.Option(
            "--all-rows",
            help="Measure on every row and not on the 30 % that are held out: for rows that the detectors were not "
            "fitted to. No set is left out then.",
        ),
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Measure the detectors of a model on held-out rows: by set, language, length and place, and with sets left out.

    The rows must be those that the detectors were calibrated with, same --data, --rows and --seed, or others, with
    --all-rows. Of a detector that has seen rows which are measured here, the report says so.
    """
    with told_errors():
        from detectors.calibration.data import Use
        from detectors.calibration.material import Request
        from guard.data import data_folder
        from guard.writable import check_writable

        names = tuple(data or ["all"])
        folder, key = model_folder(model)
        key = config or key
        check_writable(out)
        request = Request(
            folder,
            names,
            seed,
            rows or None,
            with_positions="all" in names,
            use=Use.measure_all if all_rows else Use.measure,
            kinds=DETECTORS,
            url=url,
            api_key=api_key,
            detectors=_built(configs or data_folder("model_configs"), key),
        )
        options = [*kinds_and(names, rows), "--model", model, "--seed", str(seed)]
        if config:
            options += ["--config", config]
        if all_rows:
            options.append("--all-rows")
        elif not leave_one_out:
            options.append("--no-leave-one-out")
        _evaluate(request, key, configs, out, leave_one_out and not all_rows, shlex.join(["guard", "eval", *options]))


def _evaluate(request: Request, key: str, configs: Path | None, out: Path, with_left_out: bool, command: str) -> None:
    import json

    from detectors.calibration.eval_report import html
    from detectors.calibration.evaluation import as_json
    from detectors.calibration.material import gather
    from detectors.calibration.progress import Reporter
    from guard.data import data_folder
    from guard.model_weights import weights_sha256
    from guard.writable import write_result

    folder = configs or data_folder("model_configs")
    with Reporter() as reporter:
        material = gather(request, reporter.say, reporter.total, reporter.advance_to)
        sha256 = weights_sha256(request.model)
        reporter.say(f"the detectors of {folder}" + ("" if configs else ", which ship; others: --model-configs FOLDER"))
        held_out = sum(row.split == "held_out" for row in material.rows)
        reporter.say(f"measured on {held_out} of {len(material.rows)} rows" + _hint(request))
        reports, without = _reports(material, request, folder, key, sha256, with_left_out, reporter)
        for kind, why in of_statements(folder, key).items():
            without[kind] = why
            reporter.say(f"{kind} is not evaluated: {why}")
        about = _about(request, key, command, material, folder, sha256)
        about |= {"not_evaluated": without} if without else {}
        content = {"about": about, "detectors": {name: as_json(report) for name, report in reports.items()}}
        write_result(out / "report.json", f"{json.dumps(content, indent=1)}\n".encode())
        write_result(out / "report.html", html(about, reports).encode())
        reporter.show_pooled({name: report.pooled for name, report in reports.items()})
        reporter.say(f"wrote {out / 'report.html'} and {out / 'report.json'}")


def _hint(request: Request) -> str:
    """How to measure more of one's own rows."""
    from detectors.calibration.data import Use
    from detectors.calibration.own_rows import is_own

    if request.use is Use.measure_all or not all(map(is_own, request.data)):
        return ""
    return ", the held-out ones; where the detectors were fitted to none of them, --all-rows measures all"


def _built(configs: Path, key: str) -> dict[str, Any]:
    """By kind. Raises ``DataError`` where there is none."""
    from detectors.calibration.sources import DataError
    from detectors.registry import build_detector

    built = {
        kind: build_detector(kind, path) for kind in DETECTORS if (path := configs / kind / f"{key}.json").is_file()
    }
    if not built:
        raise DataError(
            f"{configs}: has no detector of {key} ({', '.join(f'{kind}/{key}.json' for kind in DETECTORS)})"
        )
    return built


def of_statements(configs: Path, key: str) -> dict[str, str]:
    """By kind, of detectors that read statements made from facts: why they are not measured on rows, and on how much
    their figures rest. Raises ``ModelConfigError``."""
    from detectors.calibration.seen_rows import seen_count
    from detectors.model_config import ModelConfig
    from detectors.registry import build_detector

    told = {}
    for kind in sorted(OFFLINE):
        path = configs / kind / f"{key}.json"
        config = getattr(build_detector(kind, path), "config", None) if path.is_file() else None
        if not isinstance(config, ModelConfig) or config.calibration is None:
            continue
        made = config.calibration
        seen = seen_count(made.seen_rows)
        told[kind] = f"it reads statements made from facts, of which {path} has seen " + (
            f"{seen}; those that it was measured on are held out by seed {made.seed}"
            if seen
            else f"some and does not say which; it was calibrated by: {made.command}"
        )
    return told


def _reports(
    material: Material, request: Request, configs: Path, key: str, sha256: str, with_left_out: bool, reporter: Reporter
) -> tuple[dict[str, DetectorReport], dict[str, str]]:
    """By kind, what was measured, and why nothing was."""
    import numpy as np

    from detectors.calibration.demands import DEMANDS, measurable, readable
    from detectors.calibration.evaluation import Rated, report_of
    from detectors.calibration.feature_store import FeatureError
    from detectors.calibration.leave_one_out import leave_one_out
    from detectors.calibration.positions import SOURCE
    from detectors.calibration.probe_candidates import Choice
    from detectors.calibration.sources import DataError
    from detectors.combination import Combination

    rows, features, built, seed = material.rows, material.features, request.detectors, request.seed
    index = np.flatnonzero([row.split == "held_out" for row in rows])
    left_out: dict[str, Any] = {}
    if with_left_out and "probe" in built:
        params = built["probe"].config.params
        plain = np.flatnonzero([row.source != SOURCE for row in rows])
        choice = None if "probe" in material.as_read else Choice(params.pooling, tuple(params.layers))
        if choice is None:
            reporter.say("with sets left out only text_baseline is measured: what the probe reads is kept of no row")
        left_out = leave_one_out([rows[i] for i in plain], features.part(plain), choice, seed, reporter.say)
    reports: dict[str, DetectorReport] = {}
    without, scores = dict[str, str](), dict[str, Any]()
    for kind, detector in built.items():
        reporter.say(f"scoring with {kind}")
        read = set(readable(kind, rows))
        inputs = (
            [scores[name] for name in detector.inputs if name in scores] if isinstance(detector, Combination) else []
        )
        at = np.array([i for i in index if i in read and all(np.isfinite(one[i]) for one in inputs)], np.int64)
        kept = [rows[i] for i in at]
        try:
            measurable(
                [row for row in kept if row.source != SOURCE], f" {DEMANDS[kind].which}" if kind in DEMANDS else ""
            )
            found = _scores(
                kind, detector, material, kept, features.part(at), {n: one[at] for n, one in scores.items()}
            )
            if kind in material.windows:
                windows, read_of = material.windows[kind]
                found = windows.highest(at, found, _scores(kind, detector, material, windows.rows, read_of, {}))
                reporter.say(f"{kind}: the highest of each row and its windows, {len(windows.rows)} in all")
        except (DataError, FeatureError) as error:
            without[kind] = str(error)
            reporter.say(f"{kind} is not evaluated: {error}")
            continue
        scores[kind] = np.full(len(rows), np.nan)
        scores[kind][at] = found
        said = remarks_on(detector, configs / kind / f"{key}.json", [rows[i] for i in sorted(read)], seed, sha256)
        for one in said:
            reporter.say(f"warning: {kind}: {one}")
        reports[kind] = report_of(
            Rated(kept, found, features.tokens[at]), detector.thresholds, seed, left_out.get(kind), said
        )
    if not reports:
        raise DataError("; ".join(f"{kind} cannot be evaluated: {why}" for kind, why in without.items()))
    return reports, without


def _scores(
    kind: str, detector: Any, material: Material, rows: Sequence[Row], features: Features, others: Mapping[str, Any]
) -> Any:
    """``[rows]``. Raises ``FeatureError``."""
    from detectors.calibration.scoring import scored_rows

    if kind in material.as_read:
        return material.as_read[kind].scores(rows)
    return scored_rows(detector, rows, features, others)


def remarks_on(detector: Any, path: Path, rows: Sequence[Row], seed: int, sha256: str) -> list[str]:
    """What in its record does not fit this evaluation. rows: of every split, of those that its kind reads; sha256: of
    the model's weights."""
    from detectors.base import TextDetector
    from detectors.calibration.seen_rows import seen_remark

    calibration = detector.config.calibration
    if calibration is None:
        return []
    said = [seen_remark(calibration, path, rows, seed)]
    if calibration.model_sha256 != sha256 and not isinstance(detector, TextDetector):
        said.append(
            f"{path} was calibrated on other weights (SHA-256 {calibration.model_sha256[:12]}, here {sha256[:12]})"
        )
    return [one for one in said if one]


def _about(request: Request, key: str, command: str, material: Material, configs: Path, sha256: str) -> dict[str, Any]:
    import datetime

    from detectors.calibration.provenance import data_sources, versions

    return {
        "model": key,
        "model_sha256": sha256,
        "model_configs": str(configs),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "data": [source.model_dump() for source in data_sources(material.rows)],
    }
