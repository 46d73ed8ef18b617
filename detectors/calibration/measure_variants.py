"""What other ways to read the same rows give: the mean over the data, both together, and with the text baseline.

``python -m detectors.calibration.measure_variants --rows 2000 --out bench/results/smollm2-135m-variants.json`` measures
and records. Each part is chosen and fitted as ``guard calibrate`` does it; sums are of logits, weighed by a logistic
regression on out-of-fold scores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

from detectors.calibration.baseline import baseline_scores, fit_baseline, unseen_scores
from detectors.calibration.evaluation import measured
from detectors.calibration.fit_probe import LabelledRows, Pooling, fit_probe
from detectors.calibration.material import Request, gather
from detectors.calibration.metrics import Scores
from detectors.calibration.provenance import versions
from guard.models import resolve_model

TEXT = "text baseline"
ROUNDS = 1000


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    resolved = resolve_model(given.model)
    material = gather(Request(Path(resolved.path), ("all",), given.seed, given.rows), print)
    rows, features = material.rows, material.features
    labels = np.array([row.label == "attack" for row in rows], dtype=np.int64)
    where = {s: np.flatnonzero([row.split == s for row in rows]) for s in ("train", "validation", "held_out")}
    train, validation = (
        LabelledRows(features.part(where[s]), labels[where[s]], [rows[i].group for i in where[s]])
        for s in ("train", "validation")
    )
    both, held_out = np.concatenate([where["train"], where["validation"]]), where["held_out"]
    unseen: dict[str, Scores] = {}
    scores: dict[str, Scores] = {}
    choices: dict[str, str] = {}
    poolings: tuple[Pooling, ...] = ("last_token", "mean")
    for pooling in poolings:
        probe = fit_probe(train, validation, given.seed, pooling)
        unseen[pooling], scores[pooling] = probe.unseen, probe.logits(features.part(held_out))
        choices[pooling] = f"layers {list(probe.layers)}"
    texts = [row.text for row in rows]
    model = fit_baseline(
        [texts[i] for i in where["train"]], train.labels, [texts[i] for i in where["validation"]], validation.labels
    )
    groups = [rows[i].group for i in both]
    unseen[TEXT] = unseen_scores(model, [texts[i] for i in both], labels[both], groups, given.seed)
    scores[TEXT] = baseline_scores(model, [texts[i] for i in held_out])
    for parts in (("last_token", "mean"), ("last_token", TEXT), ("mean", TEXT), ("last_token", "mean", TEXT)):
        weighed = LogisticRegression(C=np.inf, class_weight="balanced")
        weighed.fit(np.stack([unseen[part] for part in parts], axis=1), labels[both])
        scores[" + ".join(parts)] = weighed.decision_function(np.stack([scores[part] for part in parts], axis=1))
    of_groups = [rows[i].group for i in held_out]
    found = {
        name: asdict(measured(one, labels[held_out], of_groups, given.seed, ROUNDS)) for name, one in scores.items()
    }
    about = {
        "model": resolved.config_key,
        "command": f"python -m detectors.calibration.measure_variants --rows {given.rows} --seed {given.seed}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "choices": choices,
    }
    given.out.write_text(json.dumps({"about": about, "measured": found}, indent=1) + "\n", encoding="utf-8")
    for name, one in found.items():
        print(f"{name}: AUROC {one['auroc']:.3f}, {one['tpr_1pct']:.0%} at 1 %")


if __name__ == "__main__":
    main(sys.argv[1:])
