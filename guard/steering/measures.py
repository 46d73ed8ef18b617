"""What a sweep can measure of steered answers, by the name that a user writes; higher is stronger.

Owns these measures. ``language:fr`` is the share of function words of one language, ``pattern:REGEX`` the share of
answers in which it is found. ``words:YES|NO`` says by how much likelier, in log-probability, an answer begins with one
of the first words than with one of the second; each side is one word or several with commas. ``probe:FILE`` is the mean
score that a calibrated probe gives to the conversation with the answer in it, as the unsteered model reads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from guard.mia.results import Readouts
from guard.mia.spec import MiaSpec, Steer, TokenRanges
from guard.steering.coherence import continuation_logprobs
from guard.steering.languages import FUNCTION_WORDS, language_share
from guard.steering.rows import Conversation


class MeasureError(ValueError):
    """A measure that there is none of, or whose argument cannot be used."""


@dataclass(frozen=True)
class Answered:
    """All prompts answered under one setting. prompts, answers: token ids. steer: None without steering."""

    conversations: Sequence[Conversation]
    prompts: Sequence[tuple[int, ...]]
    texts: Sequence[str]
    steer: Steer | None


@dataclass(frozen=True)
class Measure:
    """``value``: of the answers under one setting, with the engine that gave them. ``layers``: whose hidden states the
    engine must have taps for."""

    name: str
    value: Callable[[Any, Answered], float]
    layers: tuple[int, ...] = ()


def make_measure(text: str) -> Measure:
    """From ``KIND:ARGUMENT``. Raises ``MeasureError``, and for a probe's file ``ModelConfigError``."""
    kind, _, argument = text.partition(":")
    if kind not in MEASURES or not argument:
        raise MeasureError(f"a measure is KIND:ARGUMENT with KIND one of {', '.join(MEASURES)}; not {text!r}")
    return MEASURES[kind](argument)


def _of_text(name: str, value: Callable[[str], float]) -> Measure:
    return Measure(name, lambda _, answered: float(np.mean([value(text) for text in answered.texts])))


def _language(argument: str) -> Measure:
    if argument not in FUNCTION_WORDS:
        raise MeasureError(f"language is one of {', '.join(FUNCTION_WORDS)}; not {argument!r}")
    return _of_text(f"language:{argument}", lambda text: language_share(text, argument))


def _pattern(argument: str) -> Measure:
    try:
        pattern = re.compile(argument)
    except re.error as error:
        raise MeasureError(f"pattern {argument!r} is no regular expression: {error}") from None
    return _of_text(f"pattern:{argument}", lambda text: float(pattern.search(text) is not None))


def _words(argument: str) -> Measure:
    sides = [[word for word in side.split(",") if word.strip()] for side in argument.split("|")]
    if len(sides) != 2 or not all(sides):
        raise MeasureError(f"words are FOR|AGAINST, each side one word or several with commas; not {argument!r}")

    def margin(llm: Any, answered: Answered) -> float:
        wanted, others = ([llm.tokenizer.encode(word, add_special_tokens=False) for word in side] for side in sides)
        asked = [(prompt, ids) for prompt in answered.prompts for ids in (*wanted, *others)]
        specs = [_spelt_out(answered.steer, prompt, ids) for prompt, ids in asked]
        sums = [math.fsum(one) for one in continuation_logprobs(llm, asked, specs)]
        rows = np.array(sums).reshape(len(answered.prompts), -1)
        return float(np.mean(_log_sum(rows[:, : len(wanted)]) - _log_sum(rows[:, len(wanted) :])))

    return Measure(f"words:{argument}", margin)


def _spelt_out(steer: Steer | None, prompt: Sequence[int], word: Sequence[int]) -> str | None:
    """The steering for an answer's words that stand in the prompt, so that they get what generated tokens would."""
    if steer is None:
        return None
    spans = {"prefill": (0, len(prompt)), "decode": (len(prompt), len(prompt) + len(word))}
    changes: dict[str, Any] = {"phase": "both"}
    if steer.phase != "both":
        changes["positions"] = TokenRanges(tokens=(spans[steer.phase],))
    return MiaSpec(steer=(steer.model_copy(update=changes),)).to_wire()


def _log_sum(rows: Any) -> Any:
    return np.logaddexp.reduce(rows, axis=1)


def _probe(argument: str) -> Measure:
    from detectors.probe import Probe

    probe = Probe.load(Path(argument))
    plan = probe.plan()
    if plan.probes:
        raise MeasureError(f"{argument}: this probe is computed in the engine; a sweep reads states")
    spec = MiaSpec.model_validate({"spans": plan.spans, "hidden": plan.hidden})

    def mean_score(llm: Any, answered: Answered) -> float:
        said = zip(answered.conversations, answered.texts, strict=True)
        read: list[Readouts] = llm.read([(*asked, _answer(text)) for asked, text in said], spec)
        scores = [probe.score(one.items) for one in read]
        if missing := [score.reason for score in scores if score.value is None]:
            raise MeasureError(f"{argument}: no score for {len(missing)} of {len(scores)} answers: {missing[0]}")
        return float(np.mean([score.value for score in scores if score.value is not None]))

    layers = tuple(sorted({capture.layer for capture in plan.hidden.values()}))
    return Measure(f"probe:{argument}", mean_score, layers)


def _answer(text: str) -> Mapping[str, str]:
    return {"role": "assistant", "content": text}


MEASURES: Mapping[str, Callable[[str], Measure]] = {
    "language": _language,
    "pattern": _pattern,
    "words": _words,
    "probe": _probe,
}
