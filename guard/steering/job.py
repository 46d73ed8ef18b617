"""``guard steer learn`` and ``guard steer sweep`` from start to end.

Owns the order of the steps, and what the record of a vector and the file of a sweep say about how they were made.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectors.calibration.provenance import versions
from detectors.calibration.readers import HOST_BYTES, open_engine
from guard.mia.engine_config import EngineConfig
from guard.model_weights import weights_sha256
from guard.steering.learning import Learnt, Method, learn
from guard.steering.rows import Pairs
from guard.steering.states import At, Reading, default_store, read_states
from guard.steering.sweep import Result, Sweep, Trial, kept_trials, run_sweep, sweep_key, write_trials
from guard.steering.vector_files import check_replaces_no_other, name_at, write_vector
from guard.writable import NotWritableError

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


def check_vectors_replace_no_other(job: LearnJob, folder: Path) -> None:
    """Of this name, at every layer. Raises ``NotWritableError``."""
    same = {
        "pairs_sha256": job.pairs.sha256,
        "method": job.method,
        "at": job.at,
        "model_sha256": weights_sha256(job.model),
    }
    for layer in job.layers:
        check_replaces_no_other(folder / f"{name_at(job.name, layer)}.safetensors", same)


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


@dataclass(frozen=True)
class SweepJob:
    """``vectors``: the model's steering folder. ``out``: the trials' file. ``picture``: the plot's, written by the
    caller. ``force``: replace files of another sweep."""

    sweep: Sweep
    model: Path
    config_key: str
    vectors: Path
    out: Path
    picture: Path
    command: str
    force: bool = False


def sweep_settings(job: SweepJob, progress: Callable[[int], None]) -> Result:
    """Try all settings, keeping what is done in ``job.out``. ``progress`` gets the number of settings done, of which
    the unsteered one is one. Raises ``NotWritableError`` where files of something else are in the way."""
    sweep = job.sweep
    model_sha256 = weights_sha256(job.model)
    vectors = {
        layer: (job.vectors / f"{name_at(sweep.name, layer)}.safetensors").read_bytes() for layer in sweep.layers
    }
    key = sweep_key(sweep, model_sha256, vectors)
    if not job.force:
        _check_replaces_no_other(job, key)
    about = {
        "vector": sweep.name,
        "model": job.config_key,
        "model_sha256": model_sha256,
        "measure": sweep.measure.name,
        "phase": sweep.phase,
        "max_tokens": sweep.max_tokens,
        "prompts": len(sweep.prompts.conversations),
        "prompts_sha256": sweep.prompts.sha256,
        "perplexity_factor": sweep.perplexity_factor,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": job.command,
        "versions": versions(),
    }

    def keep(trials: Sequence[Trial]) -> None:
        write_trials(job.out, key, trials, about)
        progress(len(trials))

    kept = kept_trials(job.out, key)
    progress(len(kept))
    wanted = {(layer, c) for layer in sweep.layers for c in sweep.coefficients} | {(0, 0.0)}
    all_kept = wanted <= {(one.layer, one.coefficient) for one in kept}
    engine = nullcontext() if all_kept else open_engine(job.model, sweep.engine_config(job.vectors))
    with engine as llm:
        result = run_sweep(llm, sweep, kept, keep)
    best = result.recommended
    chosen = None if best is None else {"layer": best.layer, "coefficient": best.coefficient}
    tried = {(one.layer, one.coefficient): one for one in (*kept, result.unsteered, *result.trials)}
    write_trials(job.out, key, list(tried.values()), {**about, "recommended": chosen})
    return result


def _check_replaces_no_other(job: SweepJob, key: str) -> None:
    if kept_trials(job.out, key):
        return
    for path in (job.out, job.picture):
        if path.exists():
            raise NotWritableError(f"{path}: is not of this sweep; give another --out, or --force to replace it")
