"""The attention tracker: does the model still look at its instruction, or has the data drawn its attention away?

Owns one formula, from Hung et al., "Attention Tracker: Detecting Prompt Injection Attacks in LLMs", arXiv 2411.00348.
For each important head, from the last prompt token: attention mass on the instruction, divided by the mass on
instruction and data. The focus score is the mean over the heads; the detector's value is 1 - focus score, so that a
higher value is likelier an injection. Needs no training, only the choice of heads.

Two additions of ours. ``generated_tokens``: the focus score is the mean over the last prompt token and the first
generated ones. ``windows``: the data of a long prompt is read once more, window by window, and the highest value counts
(``detectors.windows``); a score then also has passages, the stretches of the data with most of the attention on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from detectors.base import CapturePlan, Passage, Score, SpanTokens, TokenValues
from detectors.model_config import ModelConfig, Section, load_model_config
from detectors.windows import DATA, INSTRUCTION, TEXTS, Windows
from guard.mia.results import AttentionReadout, AttentionRowsReadout, FloatArray, Readout
from guard.mia.spec import AttentionCapture, FirstGenerated, TokenRanges

CAPTURE, ANSWER = "focus", "answer"
DEFAULT_SPANS = TEXTS
"""The operator's instruction is what must keep the attention; what arrives from outside competes for it. Earlier user
turns and the model's own answers are neither: they were judged when they were new."""

EPSILON = 1e-8

PASSAGE_TOKENS = 64
MOST_PASSAGES = 3
"""That a score names, and how long each is."""

Index = Annotated[int, Field(ge=0, le=1023)]


class Params(Section):
    """``important_heads``: ``[layer, head]``, both counted from 0, as in the lists that others publish."""

    important_heads: Annotated[tuple[tuple[Index, Index], ...], Field(min_length=1, max_length=4096)]
    generated_tokens: Annotated[int, Field(ge=0, le=64)] = 0
    """From how many of the first generated tokens the attention is read, beside the last prompt token. With any, the
    score is there when the answer is. Never together with ``windows``."""
    windows: Windows | None = None
    """Read a long prompt's data once more, window by window. For passages the heads' weights on all tokens leave the
    engine: 4 bytes for each head and token of the prompt."""

    @model_validator(mode="after")
    def _one_addition(self) -> Self:
        if self.generated_tokens and self.windows is not None:
            raise ValueError("windows are read for their last prompt token alone; leave out generated_tokens")
        return self


class AttentionTrackerConfig(ModelConfig):
    params: Params


F = TypeVar("F", FloatArray, npt.NDArray[np.float64])


def focus_scores(instruction: F, data: F) -> F:
    """Share of attention on the instruction. instruction, data: attention masses, of shapes that fit; result alike."""
    return instruction / (instruction + data + np.float32(EPSILON))


class AttentionTracker:
    kind = "attention_tracker"
    looks_back = True

    def __init__(self, config: AttentionTrackerConfig) -> None:
        self.config = config
        self.thresholds: Mapping[str, float] = config.threshold_values()
        self.windows = config.params.windows
        self.heads = tuple((layer + 1, head) for layer, head in config.params.important_heads)

    @classmethod
    def load(cls, path: Path) -> AttentionTracker:
        return cls(load_model_config(path, AttentionTrackerConfig))

    def plan(self) -> CapturePlan:
        spans = (INSTRUCTION, DATA)
        with_passages = self.windows is not None
        attention = {CAPTURE: AttentionCapture(heads=self.heads, spans=spans, weights=with_passages)}
        if first := self.config.params.generated_tokens:
            attention[ANSWER] = AttentionCapture(
                heads=self.heads, spans=spans, positions=FirstGenerated(generated=first)
            )
        return CapturePlan(attention=attention, spans=DEFAULT_SPANS)

    def token_plan(self, tokens: TokenRanges) -> CapturePlan:
        return CapturePlan(attention={CAPTURE: AttentionCapture(heads=self.heads, weights=True, positions=tokens)})

    def token_values(self, readouts: Mapping[str, Readout]) -> TokenValues | Score:
        """The attention of the tokens that were read, as the mean over them and the important heads."""
        readout = readouts.get(CAPTURE)
        if not isinstance(readout, AttentionReadout):
            return Score("unavailable", reason=f"no attention readout {CAPTURE!r} came back")
        if readout.status != "complete" or readout.weights is None:
            return Score("unavailable", reason=readout.reason or f"attention readout is {readout.status}")
        mean = readout.weights.astype(np.float64).mean(axis=0)
        return TokenValues(tuple(mean.tolist()), tuple(range(len(mean))))

    def score_spans(self, readouts: Mapping[str, Readout], span_tokens: SpanTokens) -> Score:
        """As ``score``; passages need to know which tokens are the data."""
        score, readout, ranges = self.score(readouts), readouts.get(CAPTURE), span_tokens.get(DATA, ())
        if score.status != "scored" or not isinstance(readout, AttentionReadout) or readout.weights is None:
            return score
        if not ranges or max(end for _, end in ranges) > readout.weights.shape[1]:
            return score
        return replace(score, passages=passages_in(readout.weights.astype(np.float64), ranges))

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        readout = readouts.get(CAPTURE)
        if not isinstance(readout, AttentionReadout):
            return Score("unavailable", reason=f"no attention readout {CAPTURE!r} came back")
        if readout.status != "complete":
            return Score("unavailable", reason=readout.reason or f"attention readout is {readout.status}")
        masses = [readout.mass.get(span) for span in (INSTRUCTION, DATA)]
        if any(mass is None or mass.shape != (len(self.heads),) for mass in masses):
            return Score("unavailable", reason=f"attention readout lacks the masses of {len(self.heads)} heads")
        instruction, data = masses
        assert instruction is not None
        assert data is not None
        focus = focus_scores(instruction, data)[None]
        if self.config.params.generated_tokens:
            answer = self._of_answer(readouts.get(ANSWER))
            if isinstance(answer, Score):
                return answer
            focus = np.concatenate([focus, answer])
        value = 1.0 - float(focus.mean(dtype=np.float64))
        if not np.isfinite(value):
            return Score("unavailable", reason="attention masses are not finite")
        return Score("scored", min(1.0, max(0.0, value)))

    def _of_answer(self, readout: Readout | None) -> FloatArray | Score:
        """Focus scores ``[tokens, heads]`` of the first generated tokens."""
        if not isinstance(readout, AttentionRowsReadout):
            return Score("unavailable", reason=f"no attention readout {ANSWER!r} came back")
        if readout.status != "complete":
            return Score("unavailable", reason=readout.reason or f"attention readout is {readout.status}")
        shape = (len(readout.positions), len(self.heads))
        if not readout.positions:
            return np.zeros(shape, np.float32)
        masses = [readout.mass.get(span) for span in (INSTRUCTION, DATA)]
        if any(mass is None or mass.shape != shape for mass in masses):
            return Score("unavailable", reason=f"attention readout lacks the masses of {len(self.heads)} heads")
        instruction, data = masses
        assert instruction is not None
        assert data is not None
        return focus_scores(instruction, data)


def passages_in(weights: npt.NDArray[np.float64], ranges: Sequence[tuple[int, int]]) -> tuple[Passage, ...]:
    """Stretches of the data that do not overlap, those with the largest share of the attention on it first.

    weights: ``[heads, tokens]``; ranges: the data's tokens. None reaches over the end of a range: two messages are two
    texts.
    """
    sums = np.concatenate([np.zeros((len(weights), 1)), np.cumsum(weights, axis=1)], axis=1)
    data = sum(sums[:, end] - sums[:, start] for start, end in ranges) + EPSILON
    found = [
        Passage(at, min(at + PASSAGE_TOKENS, end), _share(sums, at, min(at + PASSAGE_TOKENS, end), data))
        for start, end in ranges
        for at in range(start, end, PASSAGE_TOKENS // 2)
    ]
    apart: list[Passage] = []
    for one in sorted(found, key=lambda one: one.weight, reverse=True):
        if all(one.end <= other.start or one.start >= other.end for other in apart):
            apart.append(one)
    return tuple(apart[:MOST_PASSAGES])


def _share(sums: npt.NDArray[np.float64], start: int, end: int, data: npt.NDArray[np.float64]) -> float:
    """Mean over the heads."""
    return min(1.0, max(0.0, float(((sums[:, end] - sums[:, start]) / data).mean())))
