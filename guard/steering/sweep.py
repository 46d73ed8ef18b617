"""Where and how strongly to steer: every layer with every coefficient, its effect measured, and what it costs in sense.

Owns the trials' file, which a stopped sweep goes on from, and the choice among them. The file has numbers, and one
answer for each setting so that a reader can see what the numbers mean.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from guard.mia.engine_config import EngineConfig
from guard.mia.spec import MiaSpec, Steer
from guard.steering.coherence import continuation_logprobs, distinct_share, perplexity
from guard.steering.measures import Answered, Measure
from guard.steering.rows import Prompts
from guard.steering.vector_files import name_at
from guard.writable import write_result

LEAST_DISTINCT = 0.9
"""Answers whose share of distinct word triples falls below this share of the unsteered one's count as loops."""

Phase = Literal["prefill", "decode", "both"]


@dataclass(frozen=True)
class Trial:
    """One setting over all prompts. Of the unsteered answers layer and coefficient are 0.

    perplexity: of the answers to the unsteered model. distinct: mean share of distinct word triples. dose: the largest
    change of a token's stream, as a part of its length. example: the answer to the first prompt.
    """

    layer: int
    coefficient: float
    effect: float
    perplexity: float
    distinct: float
    dose: float
    example: str


@dataclass(frozen=True)
class Sweep:
    """What is tried. ``perplexity_factor``: of the unsteered answers' perplexity, at most so many times."""

    name: str
    layers: tuple[int, ...]
    coefficients: tuple[float, ...]
    phase: Phase
    max_tokens: int
    prompts: Prompts
    measure: Measure
    perplexity_factor: float

    def engine_config(self, folder: Path) -> EngineConfig:
        return EngineConfig(
            hidden_layers=self.measure.layers,
            steering_layers=self.layers,
            steering_folder=folder,
            steering_vectors=tuple(name_at(self.name, layer) for layer in self.layers),
        )

    def steer(self, layer: int, coefficient: float) -> Steer:
        return Steer(vector=name_at(self.name, layer), layer=layer, coefficient=coefficient, phase=self.phase)


@dataclass(frozen=True)
class Result:
    unsteered: Trial
    trials: tuple[Trial, ...]
    perplexity_factor: float

    def keeps_to_limits(self, trial: Trial) -> bool:
        return (
            trial.perplexity <= self.perplexity_factor * self.unsteered.perplexity
            and trial.distinct >= LEAST_DISTINCT * self.unsteered.distinct
        )

    @property
    def recommended(self) -> Trial | None:
        """The strongest effect that keeps to the limits and is more than none; of equals the gentlest."""
        fit = [one for one in self.trials if self.keeps_to_limits(one) and one.effect > self.unsteered.effect]
        return max(fit, key=lambda one: (one.effect, -one.dose), default=None)


def run_sweep(llm: Any, sweep: Sweep, kept: Sequence[Trial], keep: Callable[[Sequence[Trial]], None]) -> Result:
    """Try what is not in ``kept``; ``keep`` gets all trials so far, each time that a layer is done."""
    trials = {(one.layer, one.coefficient): one for one in kept}
    for layer in (0, *sweep.layers):
        settings = [(layer, c) for c in (sweep.coefficients if layer else (0.0,))]
        if todo := [setting for setting in settings if setting not in trials]:
            trials |= {(one.layer, one.coefficient): one for one in _try(llm, sweep, todo)}
            keep(list(trials.values()))
    wanted = [trials[layer, c] for layer in sweep.layers for c in sweep.coefficients]
    return Result(trials[0, 0.0], tuple(wanted), sweep.perplexity_factor)


def _try(llm: Any, sweep: Sweep, settings: Sequence[tuple[int, float]]) -> list[Trial]:
    asked = sweep.prompts.conversations
    steers = [sweep.steer(layer, c) if layer else None for layer, c in settings]
    specs = [MiaSpec(steer=(steer,)) if steer else MiaSpec() for steer in steers for _ in asked]
    answers = llm.chat(list(asked) * len(settings), specs, max_tokens=sweep.max_tokens)
    unsteered = [None] * len(answers)
    logprobs = continuation_logprobs(llm, [(one.prompt_token_ids, one.token_ids) for one in answers], unsteered)
    trials = []
    for i, ((layer, coefficient), steer) in enumerate(zip(settings, steers, strict=True)):
        own = slice(i * len(asked), (i + 1) * len(asked))
        some = answers[own]
        texts = [one.text for one in some]
        answered = Answered(asked, [one.prompt_token_ids for one in some], texts, steer)
        doses = [report.relative_dose for one in some for readouts in one.readouts for report in readouts.steering]
        trials.append(
            Trial(
                layer,
                coefficient,
                effect=sweep.measure.value(llm, answered),
                perplexity=perplexity([one for tokens in logprobs[own] for one in tokens]),
                distinct=float(np.mean([distinct_share(text) for text in texts])),
                dose=max(doses, default=0.0),
                example=texts[0],
            )
        )
    return trials


def sweep_key(sweep: Sweep, model_sha256: str, vectors: Mapping[int, bytes]) -> str:
    """Of everything that a trial's numbers depend on. vectors: bytes of the files by layer."""
    shown = [sweep.name, sweep.phase, sweep.max_tokens, sweep.prompts.sha256, sweep.measure.name, model_sha256]
    digests = {layer: hashlib.sha256(raw).hexdigest() for layer, raw in vectors.items()}
    return hashlib.sha256(json.dumps([shown, digests]).encode()).hexdigest()


def kept_trials(file: Path, key: str) -> list[Trial]:
    """Those of an earlier run with the same key; none of another's, or where there is no such file."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        trials = [{**one, "perplexity": one["perplexity"] or math.inf} for one in raw["trials"]]
        return [Trial(**one) for one in trials] if raw["key"] == key else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_trials(file: Path, key: str, trials: Sequence[Trial], about: Mapping[str, Any]) -> None:
    """Whole or not at all. Infinite perplexities, of settings that answer with nothing, are written as null. Raises
    ``NotWritableError``."""
    shown = [asdict(_rounded(one)) for one in trials]
    for one in shown:
        if math.isinf(one["perplexity"]):
            one["perplexity"] = None
    text = json.dumps({**about, "key": key, "trials": shown}, indent=1, ensure_ascii=False, allow_nan=False)
    write_result(file, f"{text}\n".encode())


def _rounded(trial: Trial) -> Trial:
    numbers = {name: round(getattr(trial, name), 5) for name in ("effect", "perplexity", "distinct", "dose")}
    return replace(trial, **numbers)
