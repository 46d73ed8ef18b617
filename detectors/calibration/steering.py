"""Learns a steering vector by contrast, and tries where and how strongly to add it.

Owns the vector ``caution``: the mean difference, at the last prompt token, between ordinary requests after turns in
which the assistant declined, and the same requests alone. Coefficient 1 adds that difference. Layer and coefficient are
tried on suspicious prompts of our own: the answer should decline, and still be text rather than a loop.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

from detectors.calibration.engine_states import state_of
from detectors.calibration.features import model_shape
from detectors.calibration.fitted import Job
from detectors.calibration.provenance import versions
from detectors.calibration.readers import open_engine
from guard.mia.engine_config import EngineConfig
from guard.mia.results import FloatArray
from guard.mia.spec import HiddenCapture, MiaSpec, Steer
from guard.model_weights import weights_sha256
from guard.steering.coherence import distinct_share
from guard.steering.vector_files import check_replaces_no_other, write_vector

NAME = "caution"
METHOD = "difference of means at the last prompt token: after turns that declined, against none"
COEFFICIENTS = (0.8, 1.0, 1.2, 1.4)
DEPTHS = (0.7, 0.73, 0.77, 0.8, 0.87, 0.9)
"""Layers tried, as shares of the model's depth; the earlier ones turned answers into loops before they declined."""
ANSWER_TOKENS = 40
LEAST_DISTINCT = 0.9
"""Answers whose share of distinct word triples falls below this share of the unsteered one's count as loops."""

DECLINES = re.compile(r"\b(sorry|can't|cannot|unable|not (able|allowed|available)|apologi[sz]e)\b", re.IGNORECASE)

Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class Trial:
    """declined: share of answers that open by declining. distinct: mean share of distinct word triples."""

    layer: int
    coefficient: float
    declined: float
    distinct: float


def contrast(with_caution: FloatArray, plain: FloatArray) -> FloatArray:
    """Difference of means over requests. Both ``[requests, layers, hidden_size]``; result ``[layers, hidden_size]``."""
    difference = with_caution.mean(axis=0, dtype=np.float64) - plain.mean(axis=0, dtype=np.float64)
    return np.asarray(difference, dtype=np.float32)


def opens_declining(text: str) -> bool:
    return DECLINES.search(text[:120]) is not None


def choose(trials: Sequence[Trial], unsteered: Trial) -> Trial:
    """Declining and still writing text count alike, loops are out; of equals the gentlest."""
    readable = [trial for trial in trials if trial.distinct >= LEAST_DISTINCT * unsteered.distinct]
    return max(readable or trials, key=lambda trial: (trial.declined + trial.distinct, -trial.coefficient))


def check_steering_replaces_no_other(job: Job, out: Path) -> None:
    """To be asked before anything is computed. Raises ``NotWritableError`` where ``calibrate_steering`` would replace a
    vector that was learnt otherwise."""
    check_replaces_no_other(_folder(job, out) / f"{NAME}.safetensors", _learnt_from(job))


def calibrate_steering(job: Job, out: Path, say: Callable[[str], None]) -> list[Path]:
    """Write ``out/steering/<config_key>/caution.safetensors``; returns the paths."""
    texts = yaml.safe_load(_texts())
    count = model_shape(job.model).layers
    layers = tuple(dict.fromkeys(max(1, round(depth * count)) for depth in DEPTHS))
    say(f"learning the steering vector {NAME!r} at layers {list(layers)}")
    vectors = dict(zip(layers, _learn(job.model, layers, texts), strict=True))
    say(f"trying {len(layers) * len(COEFFICIENTS)} settings on {len(texts['suspicious'])} suspicious prompts")
    unsteered, trials = _try_all(job.model, vectors, texts)
    best = choose(trials, unsteered)
    say(f"without steering {unsteered.declined:.0%} decline, distinct {unsteered.distinct:.2f}")
    say(f"layer {best.layer}, coefficient {best.coefficient:g}: {best.declined:.0%} decline, {best.distinct:.2f}")
    record = _record(job, vectors[best.layer], best, unsteered, trials)
    return [write_vector(_folder(job, out), NAME, vectors[best.layer], record)]


def _folder(job: Job, out: Path) -> Path:
    return out / "steering" / job.config_key


def _texts() -> str:
    return files("detectors.calibration.texts").joinpath("steering.yaml").read_text(encoding="utf-8")


def _learnt_from(job: Job) -> dict[str, Any]:
    """What the vector, its layer and its coefficient depend on."""
    return {
        "model_sha256": weights_sha256(job.model),
        "method": METHOD,
        "texts_sha256": hashlib.sha256(_texts().encode()).hexdigest(),
        "depths": list(DEPTHS),
        "coefficients": list(COEFFICIENTS),
    }


def _learn(model: Path, layers: Sequence[int], texts: dict[str, Any]) -> FloatArray:
    cautious = [_conversation(texts, request, texts["caution"]) for request in texts["requests"]]
    plain = [_conversation(texts, request) for request in texts["requests"]]
    spec = MiaSpec(hidden={f"h{layer}": HiddenCapture(layer=layer) for layer in layers})
    with open_engine(model, EngineConfig(hidden_layers=tuple(layers))) as llm:
        readouts = llm.read([*cautious, *plain], spec)
    states = np.stack(
        [
            np.stack([state_of(one, f"h{layer}", f"conversation {number}", layer) for layer in layers])
            for number, one in enumerate(readouts, start=1)
        ]
    )
    return contrast(states[: len(cautious)], states[len(cautious) :])


def _try_all(model: Path, vectors: dict[int, FloatArray], texts: dict[str, Any]) -> tuple[Trial, list[Trial]]:
    settings = [(layer, coefficient) for layer in vectors for coefficient in COEFFICIENTS]
    specs = [MiaSpec()]
    specs += [MiaSpec(steer=(Steer(vector=f"at{layer}", layer=layer, coefficient=c),)) for layer, c in settings]
    prompts = [_conversation(texts, request) for request in texts["suspicious"]]
    with tempfile.TemporaryDirectory(prefix="mia-steering-") as folder:
        for layer, vector in vectors.items():
            save_file({"vector": vector}, Path(folder) / f"at{layer}.safetensors")
        config = EngineConfig(
            steering_layers=tuple(vectors),
            steering_folder=Path(folder),
            steering_vectors=tuple(f"at{layer}" for layer in vectors),
        )
        with open_engine(model, config) as llm:
            answers = llm.chat(
                prompts * len(specs), [spec for spec in specs for _ in prompts], max_tokens=ANSWER_TOKENS
            )
    size = len(prompts)
    trials = [
        _measure(layer, coefficient, [answer.text for answer in answers[i * size : (i + 1) * size]])
        for i, (layer, coefficient) in enumerate([(0, 0.0), *settings])
    ]
    return trials[0], trials[1:]


def _measure(layer: int, coefficient: float, answers: Sequence[str]) -> Trial:
    declined = sum(map(opens_declining, answers)) / len(answers)
    return Trial(layer, coefficient, declined, float(np.mean([distinct_share(answer) for answer in answers])))


def _conversation(texts: dict[str, Any], request: str, turns: Sequence[Sequence[str]] = ()) -> Conversation:
    messages = [{"role": "system", "content": texts["system"]}]
    for user, answer in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": request}]


def _record(job: Job, vector: FloatArray, best: Trial, unsteered: Trial, trials: Sequence[Trial]) -> dict[str, Any]:
    return {
        "model": job.config_key,
        **_learnt_from(job),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": job.command,
        "versions": versions(),
        "norm": round(float(np.linalg.norm(vector)), 4),
        "chosen": asdict(best),
        "unsteered": asdict(unsteered),
        "trials": [asdict(trial) for trial in trials],
    }
