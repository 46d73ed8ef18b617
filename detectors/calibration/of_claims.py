"""H-Node, from true and false claims to a fitted detector.

Owns which claims, and the order of the steps; held-out subjects are looked at once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from detectors.calibration.baseline import baseline_scores, fit_baseline
from detectors.calibration.claim_features import claim_plan, read_claims
from detectors.calibration.claims import WHEELS_NEEDED, Claim, claims
from detectors.calibration.fit_h_node import Statements, fit_h_node, h_node_files
from detectors.calibration.fitted import Fitted, Job, Scored, calibration
from detectors.calibration.metrics import Tried
from detectors.calibration.provenance import fact_sources
from detectors.calibration.seen_rows import seen_digests
from detectors.calibration.split import SPLITS
from detectors.calibration.wheels import pull
from detectors.h_node import HNodeConfig
from detectors.linear import sigmoid
from guard.mia.results import FloatArray

SUBJECTS = 200
"""Subjects of claims, unless all rows are asked for: about a thousand claims, of which a CPU reads five a second."""


def fit_on_claims(
    job: Job,
    subjects: int | None,
    say: Callable[[str], None] = lambda _: None,
    total: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] | None = None,
) -> Fitted:
    """subjects: of so many at most; None for all. Raises ``DataError`` and ``FeatureError``."""
    for name in WHEELS_NEEDED:
        pull(name)
    made = claims(job.seed, subjects)
    say(f"reading {len(made)} true and false claims with the model")
    total(len(made))
    last, _ = read_claims(job.model, made, progress=progress)
    say("choosing a layer for H-Node and fitting it")
    return fit(job, made, last, claim_plan(job.model).layers)


def fit(job: Job, made: Sequence[Claim], last: FloatArray, layers: Sequence[int]) -> Fitted:
    """last: ``[claims, layers, hidden_size]``, at the answers' last tokens."""
    labels = np.array([int(claim.false) for claim in made])
    where = {split: np.flatnonzero([claim.split == split for claim in made]) for split in SPLITS}
    parts = {
        split: Statements(
            {layer: last[at, i].astype(np.float64) for i, layer in enumerate(layers)},
            labels[at],
            [made[i].group for i in at],
        )
        for split, at in where.items()
    }
    texts = {split: [made[i].answer for i in at] for split, at in where.items()}
    fitted = fit_h_node(parts["train"], parts["validation"], job.seed)
    params, raw = h_node_files(fitted, job.config_key, read="answer", pooling="last_token")
    text = fit_baseline(texts["train"], parts["train"].labels, texts["validation"], parts["validation"].labels)
    held_out = parts["held_out"]
    sources = [made[i].source for i in where["held_out"]]

    def scored(scores: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Scored:
        return Scored(scores, held_out.labels, held_out.groups, sources)

    validation = np.asarray(sigmoid(fitted.logits(parts["validation"].states)))
    config = HNodeConfig(
        model_info=job.model_info,
        params=params,
        calibration=calibration(
            job,
            "logistic regression on the answer's last token; benign: true answers, attack: false ones",
            fact_sources(made, lambda claim: "false" if claim.false else "true"),
            fitted.choices,
            Tried(validation, parts["validation"].labels),  # each states a fact of its own
            scored(np.asarray(sigmoid(fitted.logits(held_out.states)))),
            scored(baseline_scores(text, texts["held_out"])),
            seen_digests(made),
        ),
    )
    return Fitted(config, {params.weights: raw})
