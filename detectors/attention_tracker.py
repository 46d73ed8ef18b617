"""The attention tracker: does the model still look at its instruction, or has the data drawn its attention away?

Owns one formula, from Hung et al., "Attention Tracker: Detecting Prompt Injection Attacks in LLMs", arXiv 2411.00348.
For each important head, from the last prompt token: attention mass on the instruction, divided by the mass on
instruction and data. The focus score is the mean over the heads; the detector's value is 1 - focus score, so that a
higher value is likelier an injection. Needs no training, only the choice of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from detectors.base import CapturePlan, Score
from detectors.model_config import ModelConfig, Section, load_model_config
from guard.mia.results import AttentionReadout, FloatArray, Readout
from guard.mia.spec import AttentionCapture

CAPTURE = "focus"
INSTRUCTION, DATA = "instruction", "data"

DEFAULT_SPANS = {INSTRUCTION: ("system",), DATA: ("user.last", "tool")}
"""The operator's instruction is what must keep the attention; what arrives from outside competes for it. Earlier user
turns and the model's own answers are neither: they were judged when they were new."""

EPSILON = 1e-8

Index = Annotated[int, Field(ge=0, le=1023)]


class Params(Section):
    """``important_heads``: ``[layer, head]``, both counted from 0, as in the lists that others publish."""

    important_heads: Annotated[tuple[tuple[Index, Index], ...], Field(min_length=1, max_length=4096)]


class AttentionTrackerConfig(ModelConfig):
    params: Params


def focus_scores(instruction: FloatArray, data: FloatArray) -> FloatArray:
    """Share of attention on the instruction. instruction, data: attention masses, any one shape; result the same."""
    return instruction / (instruction + data + np.float32(EPSILON))


class AttentionTracker:
    kind = "attention_tracker"

    def __init__(self, config: AttentionTrackerConfig) -> None:
        self.config = config
        self.thresholds: Mapping[str, float] = config.threshold_values()
        self.heads = tuple((layer + 1, head) for layer, head in config.params.important_heads)

    @classmethod
    def load(cls, path: Path) -> AttentionTracker:
        return cls(load_model_config(path, AttentionTrackerConfig))

    def plan(self) -> CapturePlan:
        return CapturePlan(
            attention={CAPTURE: AttentionCapture(heads=self.heads, spans=(INSTRUCTION, DATA))}, spans=DEFAULT_SPANS
        )

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
        value = 1.0 - float(focus_scores(instruction, data).mean(dtype=np.float64))
        if not np.isfinite(value):
            return Score("unavailable", reason="attention masses are not finite")
        return Score("scored", min(1.0, max(0.0, value)))
