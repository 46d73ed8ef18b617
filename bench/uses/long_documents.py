"""How a probe's file does on long documents: prose and texts of packages, each without an attack and with one.

``python -m bench.uses.long_documents --config my_configs/probe/NAME.json --out bench/results/FILE.json`` reads the
documents that ``detectors.calibration.measure_windows`` measures on, with an engine in this process and in the way in
which ``guard.uses.detectors_offline`` scores: whole, token by token, or window by window, as the file says.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detectors.base import Detector
from detectors.calibration.long_documents import Case, cases, cases_hash
from detectors.calibration.long_readings import LongReader
from detectors.calibration.metrics import auroc
from detectors.calibration.provenance import versions
from detectors.probe import Probe
from detectors.registry import build_detector
from guard.mia.llm import MiaLLM
from guard.models import DEFAULT_MODEL, resolve_model
from guard.uses.asking import offline
from guard.uses.detectors_offline import score, taps_for

PARTS = {"positions": "prose", "held_out": "package texts"}
AT_ONCE = 8
MAX_MODEL_LEN = 4352


def measured_cases(seed: int, model: Path, probe: Probe) -> tuple[list[Case], list[str]]:
    """Those of the halves that nothing was chosen on, and the documents that the engine does not take."""
    reader = LongReader(model, probe.config.params.layers)
    every = [case for case in cases(seed) if case.half in PARTS]
    too_long = {case.document for case in every if not reader.fits(case)}
    return [case for case in every if case.document not in too_long], sorted(too_long)


def scores_of(model: Path, probe: Detector, measured: Sequence[Case]) -> list[float]:
    found: list[float] = []
    with MiaLLM(str(model), taps_for([probe]), max_model_len=MAX_MODEL_LEN, kv_cache_memory_bytes=2**30) as llm:
        ask = offline(llm)
        for i in range(0, len(measured), AT_ONCE):
            for one in score(ask, probe, [list(case.row.messages) for case in measured[i : i + AT_ONCE]]):
                if one.score.status != "scored" or one.score.value is None:
                    raise SystemExit(f"a document has no score: {one.score.reason}")
                found.append(one.score.value)
            print(f"{len(found)} of {len(measured)}", file=sys.stderr)
    return found


def part_of(measured: Sequence[Case], scores: Sequence[float], half: str, probe: Probe) -> dict[str, Any]:
    """Numbers of documents, and how many reach each threshold."""
    at = [i for i, case in enumerate(measured) if case.half == half]
    values, labels = np.array(scores)[at], np.array([bool(measured[i].attack) for i in at], np.int64)

    def reached(threshold: float) -> dict[str, int]:
        return {name: int((values[labels == y] >= threshold).sum()) for name, y in (("benign", 0), ("attack", 1))}

    return {
        "benign": int((labels == 0).sum()),
        "attack": int((labels == 1).sum()),
        "auroc": auroc(values, labels),
        "reached": {name: reached(threshold) for name, threshold in probe.thresholds.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--config", type=Path, required=True, help="the probe's file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    model = Path(resolve_model(given.model).path)
    probe = build_detector("probe", given.config)
    assert isinstance(probe, Probe)
    measured, too_long = measured_cases(given.seed, model, probe)
    scores = scores_of(model, probe, measured)
    result = {
        "about": {
            "command": f"python -m bench.uses.long_documents --model {given.model} --seed {given.seed}",
            "calibrated_by": probe.config.calibration and probe.config.calibration.command,
            "weights_sha256": probe.config.params.weights_sha256,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": versions(),
            "cases_sha256": cases_hash(measured),
            "documents_too_long_for_the_engine": too_long,
        },
        "thresholds": dict(probe.thresholds),
        "parts": {name: part_of(measured, scores, half, probe) for half, name in PARTS.items()},
        "scores": [
            [case.half, case.document, bool(case.attack), value] for case, value in zip(measured, scores, strict=True)
        ],
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["parts"], indent=1))


if __name__ == "__main__":  # vLLM starts processes of its own
    main()
