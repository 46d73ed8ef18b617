"""``guard steer learn`` from start to end: pairs in, one file for each layer out.

Owns the order of the steps and what a vector's record says.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectors.calibration.provenance import versions, weights_sha256
from detectors.calibration.readers import HOST_BYTES, open_engine
from guard.mia.engine_config import EngineConfig
from guard.steering.learning import Learnt, Method, learn
from guard.steering.rows import Pairs
from guard.steering.states import At, Reading, default_store, read_states
from guard.steering.vector_files import name_at, write_vector

TOKENS_PER_STEP = 2048
"""Of which every one may be copied at every layer."""


@dataclass(frozen=True)
class LearnJob:
    """What to learn. ``config_key``: the model's name in ``model_configs``; ``command`` repeats the run."""

    name: str
    model: Path
    config_key: str
    pairs: Pairs
    layers: tuple[int, ...]
    method: Method
    at: At
    command: str


def learn_vectors(job: LearnJob, progress: Callable[[int], None]) -> list[Learnt]:
    """Read both sides of the pairs and learn. ``progress`` gets the number of conversations read."""
    reading = Reading(job.layers, job.at)
    sides = [*job.pairs.positive, *job.pairs.negative]
    states = read_states(
        sides, default_store(weights_sha256(job.model), reading), lambda: reading_engine(job.model, reading), progress
    )
    count = len(job.pairs.positive)
    return learn(states[:count], states[count:], job.layers, job.method)


def reading_engine(model: Path, reading: Reading) -> AbstractContextManager[Any]:
    """An engine of its own with taps for ``reading``."""
    over_tokens = reading.at == "mean"
    config = EngineConfig(
        hidden_layers=reading.layers,
        max_hidden_rows_per_step="tokens" if over_tokens else None,
        max_host_bytes=HOST_BYTES,
        max_shared_bytes=HOST_BYTES,
    )
    engine: AbstractContextManager[Any] = open_engine(model, config, max_num_batched_tokens=TOKENS_PER_STEP)
    return engine


def write_vectors(job: LearnJob, learnt: list[Learnt], folder: Path) -> list[Path]:
    common = {
        "name": job.name,
        "model": job.config_key,
        "model_sha256": weights_sha256(job.model),
        "method": job.method,
        "at": job.at,
        "pairs": len(job.pairs.positive),
        "pairs_sha256": job.pairs.sha256,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": job.command,
        "versions": versions(),
    }
    return [
        write_vector(
            folder,
            name_at(job.name, one.layer),
            one.vector,
            {
                **common,
                "layer": one.layer,
                "norm": round(one.norm, 4),
                "stream_norm": round(one.stream_norm, 4),
                "held_out": round(one.held_out, 4),
            },
        )
        for one in learnt
    ]
