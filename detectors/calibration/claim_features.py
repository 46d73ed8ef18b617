"""What the model computes on claims: the residual stream of the answer's last token, and its mean over the answer.

Owns what is read of a claim. A claim's answer stands as the assistant's last message; the state of its last token is
the one that the engine has when it has generated that token itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from detectors.calibration.claims import Claim
from detectors.calibration.engine_states import states_of
from detectors.calibration.feature_store import FeatureError, FeatureStore, Plan, Reading
from detectors.calibration.features import ROWS_AT_ONCE, candidate_layers, model_shape
from detectors.calibration.readers import ROWS_PER_STEP, open_engine
from guard.mia.engine_config import EngineConfig
from guard.mia.results import FloatArray, Readouts
from guard.mia.spec import HiddenCapture, MiaSpec, SpanPositions
from guard.model_weights import weights_sha256

ANSWER = "answer"


def claim_plan(model: Path) -> Plan:
    """All layers; no windows, which tells these readings from those of prompts."""
    layers = candidate_layers(model_shape(model).layers)
    return Plan(layers, (), layers, 0)


def claim_spec(plan: Plan) -> MiaSpec:
    return MiaSpec(
        spans={ANSWER: ("assistant.last",)},
        hidden={f"a{n}": HiddenCapture(layer=n, positions=SpanPositions(span=ANSWER)) for n in plan.layers},
    )


def read_claims(
    model: Path,
    claims: Sequence[Claim],
    folder: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """``[claims, layers, hidden_size]`` twice: at the answer's last token, and the mean over its tokens.

    What was read before is not read again. Raises ``FeatureError``.
    """
    plan = claim_plan(model)
    store = FeatureStore(weights_sha256(model), plan, folder)
    todo = [claim for claim in claims if not store.has(claim.messages)]
    done = len(claims) - len(todo)
    if todo:
        config = EngineConfig(hidden_layers=plan.layers, max_hidden_rows_per_step=ROWS_PER_STEP)
        with open_engine(model, config) as llm:
            for start in range(0, len(todo), ROWS_AT_ONCE):
                some = todo[start : start + ROWS_AT_ONCE]
                answers = llm.read([claim.messages for claim in some], claim_spec(plan))
                for claim, readouts in zip(some, answers, strict=True):
                    store.put(claim.messages, _reading(claim, readouts, plan))
                done += len(some)
                if progress is not None:
                    progress(done)
    readings = [store.get(claim.messages) for claim in claims]
    if None in readings:
        raise FeatureError("what was read of a claim cannot be found again; run the command once more")
    kept = [reading for reading in readings if reading is not None]
    return np.stack([reading.last for reading in kept]), np.stack([reading.windows[0] for reading in kept])


def _reading(claim: Claim, readouts: Readouts, plan: Plan) -> Reading:
    states = [
        states_of(readouts, f"a{layer}", f"claim {claim.id}", layer, tokens="the answer") for layer in plan.layers
    ]
    last, mean = np.stack([one[-1] for one in states]), np.stack([one.mean(axis=0) for one in states])
    return Reading(last, np.zeros((0, 2), np.float32), mean[None], np.array([len(states[0])], np.float32))
