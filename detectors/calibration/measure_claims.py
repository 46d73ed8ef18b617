"""How well the model's own states tell true from false claims, against a text classifier on the same claims.

``python -m detectors.calibration.measure_claims --out bench/results/smollm2-135m-claims.json`` measures and records.
Layers and penalty are chosen on validation subjects, held-out subjects are measured once. One layer at the answer's
last token is what an H-Node probe reads; the others show what more would give.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from detectors.calibration.baseline import baseline_scores, fit_baseline
from detectors.calibration.claim_features import read_claims
from detectors.calibration.claims import Claim, claims
from detectors.calibration.evaluation import measured
from detectors.calibration.logistic import Rotated
from detectors.calibration.metrics import Scores, auroc
from detectors.calibration.provenance import versions
from guard.mia.results import FloatArray
from guard.model_weights import weights_sha256
from guard.models import resolve_model

REGULARISATIONS = (1e-4, 1e-3, 1e-2, 1e-1)
ONE_LAYER = "one layer, last token (as an H-Node probe)"
BASELINE = "text baseline"
ROUNDS = 1000

Index = npt.NDArray[np.int64]


def measure(made: Sequence[Claim], last: FloatArray, mean: FloatArray, layers: Sequence[int], seed: int) -> Any:
    """``last``, ``mean``: ``[claims, layers, hidden_size]``. Returns what is recorded, without ``about``."""
    false = np.array([claim.false for claim in made], dtype=np.int64)
    where = {s: np.flatnonzero([claim.split == s for claim in made]) for s in ("train", "validation", "held_out")}
    scores: dict[str, Scores] = {}
    choices: dict[str, str] = {}
    for name, states, sets in _kinds(last, mean, len(layers)):
        scores[name], choices[name] = _best(states, sets, layers, false, where)
    texts = [claim.answer for claim in made]
    model = fit_baseline(
        [texts[i] for i in where["train"]],
        false[where["train"]],
        [texts[i] for i in where["validation"]],
        false[where["validation"]],
    )
    scores[BASELINE] = baseline_scores(model, [texts[i] for i in where["held_out"]])
    held_out, groups = where["held_out"], [made[i].group for i in where["held_out"]]
    labels = false[held_out]
    relations = {}
    for relation in sorted({made[i].relation for i in held_out}):
        index = np.flatnonzero([made[i].relation == relation for i in held_out])
        relations[relation] = {
            "claims": len(index),
            "probe": auroc(scores[ONE_LAYER][index], labels[index]),
            "baseline": auroc(scores[BASELINE][index], labels[index]),
        }
    return {
        "measured": {name: asdict(measured(one, labels, groups, seed, ROUNDS)) for name, one in scores.items()},
        "choices": choices,
        "relations": relations,
    }


def _kinds(last: FloatArray, mean: FloatArray, count: int) -> Iterator[tuple[str, FloatArray, list[tuple[int, ...]]]]:
    single: list[tuple[int, ...]] = [(i,) for i in range(count)]
    several = [
        tuple(sorted({round(first + (count - 1 - first) * i / (n - 1)) for i in range(n)}))
        for n in (3, 6)
        for first in (count // 4, count // 2)
    ]
    yield ONE_LAYER, last, single
    yield "several layers, last token", last, several
    yield "one layer, mean over the answer", mean, single


def _best(
    states: FloatArray,
    sets: Sequence[tuple[int, ...]],
    layers: Sequence[int],
    false: npt.NDArray[np.int64],
    where: Mapping[str, Index],
) -> tuple[Scores, str]:
    """Scores on held-out claims of what does best on validation claims, and what that is."""
    best: tuple[float, Scores, str] | None = None
    for chosen in sets:
        part = {split: _columns(states, chosen, index) for split, index in where.items()}
        rotated = Rotated(part["train"])
        for regularisation in REGULARISATIONS:
            model = rotated.fit(false[where["train"]], regularisation)
            found = auroc(model.logits(part["validation"]), false[where["validation"]])
            if best is None or found > best[0]:
                named = f"layers {[layers[i] for i in chosen]}, C={regularisation:g}: validation AUROC {found:.3f}"
                best = (found, model.logits(part["held_out"]), named)
    assert best is not None
    return best[1], best[2]


def _columns(states: FloatArray, chosen: Sequence[int], index: Index) -> npt.NDArray[np.float64]:
    return states[index][:, list(chosen)].reshape(len(index), -1).astype(np.float64)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subjects", type=int, default=None, help="so many subjects at most; default: all")
    given = parser.parse_args(arguments)
    resolved = resolve_model(given.model)
    model = Path(resolved.path)
    made = claims(given.seed, given.subjects)
    last, mean = read_claims(model, made, progress=lambda done: print(f"{done} of {len(made)} claims", flush=True))
    found = measure(made, last, mean, tuple(range(1, last.shape[1] + 1)), given.seed)
    command = f"python -m detectors.calibration.measure_claims --model {given.model} --seed {given.seed}"
    about = {
        "model": resolved.config_key,
        "model_sha256": weights_sha256(model),
        "command": command + (f" --subjects {given.subjects}" if given.subjects else ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "claims": len(made),
        "claims_sha256": hashlib.sha256(json.dumps([asdict(claim) for claim in made]).encode()).hexdigest(),
    }
    given.out.write_text(json.dumps({"about": about, **found}, indent=1) + "\n", encoding="utf-8")
    for name, one in found["measured"].items():
        print(f"{name}: AUROC {one['auroc']:.3f} ({one['auroc_interval'][0]:.3f} to {one['auroc_interval'][1]:.3f})")


if __name__ == "__main__":
    main(sys.argv[1:])
