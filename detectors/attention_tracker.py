"""The attention tracker: does the model still look at its instruction, or has the data drawn its attention away?

Owns one formula, from Hung et al., "Attention Tracker: Detecting Prompt Injection Attacks in LLMs", arXiv 2411.00348.
For each important head, from the last prompt token: attention mass on the instruction, divided by the mass on
instruction and data. The focus score is the mean over the heads; the detector's value is 1 - focus score, so that a
higher value is likelier an injection. Needs no training, only the choice of heads.

Two additions of ours. ``generated_tokens``: the focus score is the mean over the last prompt token and the first
generated ones. ``windows``: the same ratio for each stretch of the data alone, and the value is that of the stretch
that draws most. A stretch is a part of the data, so the value is at most the one without windows; a text shorter than
one stretch scores as without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from detectors.base import CapturePlan, Passage, Score, SpanTokens, TokenValues
from detectors.model_config import ModelConfig, Section, load_model_config
from guard.mia.results import AttentionReadout, AttentionRowsReadout, FloatArray, Readout
from guard.mia.spec import AttentionCapture, FirstGenerated, TokenRanges

CAPTURE, ANSWER = "focus", "answer"
INSTRUCTION, DATA = "instruction", "data"

DEFAULT_SPANS = {INSTRUCTION: ("system",), DATA: ("user.last", "tool")}
"""The operator's instruction is what must keep the attention; what arrives from outside competes for it. Earlier user
turns and the model's own answers are neither: they were judged when they were new."""

EPSILON = 1e-8

MOST_PASSAGES = 3
"""That a score names."""

Index = Annotated[int, Field(ge=0, le=1023)]


class Windows(Section):
    """``tokens``: of a stretch; ``stride``: from the beginning of one to that of the next."""

    tokens: Annotated[int, Field(ge=8, le=4096)] = 256
    stride: Annotated[int, Field(ge=1, le=4096)] = 128

    @model_validator(mode="after")
    def _every_token_is_in_one(self) -> Self:
        if self.stride > self.tokens:
            raise ValueError("a stride longer than a window leaves tokens out")
        return self


class Params(Section):
    """``important_heads``: ``[layer, head]``, both counted from 0, as in the lists that others publish."""

    important_heads: Annotated[tuple[tuple[Index, Index], ...], Field(min_length=1, max_length=4096)]
    generated_tokens: Annotated[int, Field(ge=0, le=64)] = 0
    """From how many of the first generated tokens the attention is read, beside the last prompt token. With any, the
    score is there when the answer is. Never together with ``windows``."""
    windows: Windows | None = None
    """Score long data in stretches, and say which drew the attention. The heads' weights on all tokens leave the
    engine: 4 bytes for each head and token of the prompt."""

    @model_validator(mode="after")
    def _one_addition(self) -> Self:
        if self.generated_tokens and self.windows is not None:
            raise ValueError("windows are scored from the last prompt token alone; leave out generated_tokens")
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
        whole = self.windows is not None
        attention = {CAPTURE: AttentionCapture(heads=self.heads, spans=spans, weights=whole)}
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
        """As ``score``; windows need to know which tokens are the data."""
        whole = self._whole(readouts)
        readout = readouts.get(CAPTURE)
        if self.windows is None or whole.status != "scored" or not isinstance(readout, AttentionReadout):
            return whole
        if readout.weights is None or len(readout.weights) != len(self.heads):
            return Score("unavailable", reason=f"attention readout lacks the weights of {len(self.heads)} heads")
        ranges = span_tokens.get(DATA, ())
        if not ranges or max(end for _, end in ranges) > readout.weights.shape[1]:
            return Score("unavailable", reason="which tokens are the data is not known")
        return window_score(readout.weights.astype(np.float64), readout.mass[INSTRUCTION], ranges, self.windows)

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        if self.windows is not None:
            return Score("unavailable", reason="which tokens the data are is not known")
        return self._whole(readouts)

    def _whole(self, readouts: Mapping[str, Readout]) -> Score:
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


def window_score(
    weights: npt.NDArray[np.float64],
    instruction: FloatArray,
    ranges: Sequence[tuple[int, int]],
    windows: Windows,
) -> Score:
    """The value of the stretch of data that draws most; it and the next ones apart from it are the passages, of which
    the one with the largest share of the attention on the data is the first.

    weights: ``[heads, tokens]`` attention of the last prompt token; instruction: ``[heads]`` mass; ranges: the data's
    tokens. A stretch never reaches over the end of a range: two messages are two texts.
    """
    sums = np.concatenate([np.zeros((len(weights), 1)), np.cumsum(weights, axis=1)], axis=1)
    stretches = [one for start, end in ranges for one in _stretches(start, end, windows)]
    starts, ends = np.array(stretches).T
    mass = sums[:, ends] - sums[:, starts]
    drift = (1.0 - focus_scores(instruction.astype(np.float64)[:, None], mass)).mean(axis=0)
    if not np.isfinite(drift).all():
        return Score("unavailable", reason="attention masses are not finite")
    data = sum(sums[:, end] - sums[:, start] for start, end in ranges)
    shares = (mass / (data[:, None] + EPSILON)).mean(axis=0)
    passages: list[Passage] = []
    for at in np.argsort(-drift, kind="stable"):
        start, end = stretches[at]
        if all(end <= one.start or start >= one.end for one in passages):
            passages.append(Passage(start, end, min(1.0, max(0.0, float(shares[at])))))
        if len(passages) == MOST_PASSAGES:
            break
    by_share = sorted(passages, key=lambda one: one.weight, reverse=True)
    return Score("scored", min(1.0, max(0.0, float(drift.max()))), passages=tuple(by_share))


def _stretches(start: int, end: int, windows: Windows) -> Iterator[tuple[int, int]]:
    """Of one range; the last one ends with it, and is as long as the others."""
    last = max(start, end - windows.tokens)
    for begin in range(start, last, windows.stride):
        yield begin, begin + windows.tokens
    yield last, end
