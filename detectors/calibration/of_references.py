"""Science hallucination, from claims beside references to a fitted detector.

Owns reading the detector's own conversations with the model, and the order of the steps; held-out subjects are looked
at once, at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detectors.calibration.baseline import baseline_scores, fit_baseline
from detectors.calibration.engine_states import state_of
from detectors.calibration.feature_store import FeatureError, FeatureStore, Plan, Reading
from detectors.calibration.features import ROWS_AT_ONCE, model_shape
from detectors.calibration.fit_science import fit_science, science_files
from detectors.calibration.fitted import Fitted, Job, Scored, calibration
from detectors.calibration.metrics import Tried
from detectors.calibration.provenance import fact_sources
from detectors.calibration.readers import open_engine
from detectors.calibration.references import WHEELS_NEEDED, Pair, pairs
from detectors.calibration.seen_rows import seen_digests
from detectors.calibration.split import SPLITS
from detectors.calibration.wheels import pull
from detectors.science_hallucination import ScienceConfig, rms_norm
from detectors.science_prompt import LABELS, conversation
from guard.mia.engine_config import EngineConfig
from guard.mia.results import FloatArray
from guard.mia.spec import HiddenCapture, MiaSpec
from guard.model_weights import weights_sha256

SUBJECTS = 150
"""Subjects of claims, unless all rows are asked for."""
STATE = "state"
ONE_PLUS_GAIN = ("gemma", "gemma2", "gemma3_text", "gemma3", "recurrent_gemma")
"""Model types whose final norm multiplies by one plus its weight."""


def fit_on_references(
    job: Job,
    subjects: int | None,
    say: Callable[[str], None] = lambda _: None,
    total: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] | None = None,
) -> Fitted:
    """subjects: of so many at most; None for all. Raises ``DataError`` and ``FeatureError``."""
    for name in WHEELS_NEEDED:
        pull(name)
    made = pairs(job.seed, subjects)
    gain, eps = final_norm(job.model)
    say(f"reading {len(made)} claims beside their references with the model")
    total(len(made))
    states = read_pairs(job.model, made, progress=progress)
    say("fitting the classifier of claims against references")
    return fit(job, made, states, gain, eps, model_shape(job.model).layers)


def read_pairs(
    model: Path, made: Sequence[Pair], folder: Path | None = None, progress: Callable[[int], None] | None = None
) -> FloatArray:
    """``[pairs, hidden_size]``: after the last block, at the last token of the detector's conversation.

    What was read before is not read again. Raises ``FeatureError``.
    """
    layer = model_shape(model).layers
    store = FeatureStore(weights_sha256(model), Plan((layer,), (), (), 0), folder)
    messages = [conversation(pair.reference, pair.claim) for pair in made]
    todo = [i for i, one in enumerate(messages) if not store.has(one)]
    if todo:
        with open_engine(model, EngineConfig(hidden_layers=(layer,))) as llm:
            for start in range(0, len(todo), ROWS_AT_ONCE):
                some = todo[start : start + ROWS_AT_ONCE]
                spec = MiaSpec(hidden={STATE: HiddenCapture(layer=layer)})
                for i, readouts in zip(some, llm.read([messages[i] for i in some], spec), strict=True):
                    store.put(messages[i], _reading(state_of(readouts, STATE, f"claim {made[i].id}", layer)))
                if progress is not None:
                    progress(len(made) - len(todo) + start + len(some))
    readings = [store.get(one) for one in messages]
    if None in readings:
        raise FeatureError("what was read of a claim cannot be found again; run the command once more")
    return np.stack([reading.last[0] for reading in readings if reading is not None])


def _reading(state: FloatArray) -> Reading:
    """``[hidden_size]``, and nothing else."""
    no_windows = np.zeros((0, 0, len(state)), np.float32)
    return Reading(state[None], np.zeros((0, 2), np.float32), no_windows, np.zeros(0, np.float32))


def final_norm(model: Path) -> tuple[FloatArray, float]:
    """Gain ``[hidden_size]`` and eps of the model's final RMS norm. Raises ``FeatureError`` for a model without one."""
    from safetensors import safe_open

    raw: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = raw.get("text_config", raw)
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            found = [name for name in tensors.keys() if name.endswith(".norm.weight") and ".layers." not in name]  # noqa: SIM118
            if found and "rms_norm_eps" in config:
                gain = tensors.get_tensor(found[0]).float().numpy()
                return gain + (config["model_type"] in ONE_PLUS_GAIN), float(config["rms_norm_eps"])
    raise FeatureError(f"{model}: has no final RMS norm, which the detector needs")


def fit(job: Job, made: Sequence[Pair], states: FloatArray, gain: FloatArray, eps: float, layer: int) -> Fitted:
    """states: ``[pairs, hidden_size]``, as ``read_pairs`` has them."""
    normed = rms_norm(states, gain, eps)
    labels = np.array([LABELS.index(pair.label) for pair in made])
    wrong = (labels != 0).astype(np.int64)
    where = {split: np.flatnonzero([pair.split == split for pair in made]) for split in SPLITS}
    train, validation, held_out = (where[split] for split in SPLITS)
    fitted = fit_science(normed[train], labels[train], normed[validation], labels[validation])
    params, raw = science_files(fitted, gain, eps, layer, job.config_key)
    texts = {split: [made[i].text for i in at] for split, at in where.items()}
    text = fit_baseline(texts["train"], wrong[train], texts["validation"], wrong[validation])
    groups, sources = [made[i].group for i in held_out], [made[i].source for i in held_out]

    def scored(scores: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Scored:
        return Scored(scores, wrong[held_out], groups, sources)

    probabilities = fitted.probabilities(normed[held_out])
    right = (probabilities.argmax(axis=1) == labels[held_out]).mean()
    config = ScienceConfig(
        model_info=job.model_info,
        params=params,
        calibration=calibration(
            job,
            "softmax regression on the normed state; benign: entailed, attack: contradicted or not mentioned",
            fact_sources(made, lambda pair: pair.label),
            {
                **fitted.choices,
                "labels": f"{right:.0%} of held-out pairs get their own label of three",
            },
            Tried(1.0 - fitted.probabilities(normed[validation])[:, 0], wrong[validation]),
            scored(1.0 - probabilities[:, 0]),
            scored(baseline_scores(text, texts["held_out"])),
            seen_digests(made),
        ),
    )
    return Fitted(config, {params.weights: raw})
