"""Science hallucination: does the reference that the model was given support what it claims?

Owns the formula (after Cao, Yu and Subbalakshmi, SciHal at SDP 2025, as vLLM-Hook's ``science_hallucination`` has it).
The model reads a few-shot conversation with reference and claim, once, through the same engine. x is the residual
stream of its last prompt token after the last block, h the model's final norm of it,
``h = x / sqrt(mean(x^2) + eps) * gain``; labels have the probabilities ``softmax(weight . h + bias)``. The value is
1 minus the probability of entailment.

What is ours: vLLM-Hook lets the model write a justification of up to 1024 tokens first and takes the state behind it;
here nothing is generated, which costs one prompt. Its classifier was not published and was a pickle; ours is
safetensors, with gain and eps of the norm in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from detectors.base import CapturePlan, Score, SecondPass
from detectors.linear import WeightsFile, check_shapes, load_tensors
from detectors.model_config import ModelConfig, ModelConfigError, Section, load_model_config
from detectors.science_prompt import LABELS, PROMPT_SHA256, conversation
from guard.blank_text import is_blank
from guard.mia.results import FloatArray, HiddenReadout, Readout, Readouts
from guard.mia.spec import HiddenCapture, Layer, MiaSpec

REFERENCE = "reference"
STATE = "state"
WEIGHT, BIAS, GAIN = "weight", "bias", "norm_gain"

Vector = npt.NDArray[np.float64]


class Params(Section):
    layer: Layer
    """The last block's number."""
    hidden_size: Annotated[int, Field(ge=1)]
    norm_eps: Annotated[float, Field(gt=0)]
    """``rms_norm_eps`` of the model."""
    prompt_sha256: str
    """Of the conversation that the classifier was fitted to."""
    weights: WeightsFile
    """Name of a file in this file's folder: ``weight`` [3, hidden_size], ``bias`` [3], in the order of ``LABELS``, and
    ``norm_gain`` [hidden_size], float32."""
    weights_sha256: str
    """Of that file."""


class ScienceConfig(ModelConfig):
    params: Params


def rms_norm(states: npt.ArrayLike, gain: npt.ArrayLike, eps: float) -> Vector:
    """The model's final norm. states: ``[..., hidden_size]``; gain: ``[hidden_size]``."""
    x = np.asarray(states, np.float64)
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * np.asarray(gain, np.float64))


class ScienceHallucination:
    kind = "science_hallucination"
    spans: Mapping[str, tuple[str, ...]] = {REFERENCE: ("tool",)}
    """The reference is what tools returned, unless the policy binds it otherwise."""

    def __init__(self, config: ScienceConfig, weight: FloatArray, bias: FloatArray, gain: FloatArray) -> None:
        self.config = config
        self.thresholds: Mapping[str, float] = config.threshold_values()
        self.plan_of_pass = CapturePlan(hidden={STATE: HiddenCapture(layer=config.params.layer)})
        self.weight, self.bias, self.gain = (array.astype(np.float64) for array in (weight, bias, gain))

    @classmethod
    def load(cls, path: Path) -> ScienceHallucination:
        config = load_model_config(path, ScienceConfig)
        params, file = config.params, path.parent / config.params.weights
        if params.prompt_sha256 != PROMPT_SHA256:
            raise ModelConfigError(
                f"{path}: params.prompt_sha256: fitted to another conversation than the one that is asked now"
            )
        tensors = load_tensors(file, params.weights_sha256)
        size = params.hidden_size
        check_shapes(file, tensors, {WEIGHT: (len(LABELS), size), BIAS: (len(LABELS),), GAIN: (size,)})
        return cls(config, tensors[WEIGHT], tensors[BIAS], tensors[GAIN])

    def second_pass(self, answer: str, texts: Mapping[str, str]) -> SecondPass | Score:
        reference = texts.get(REFERENCE, "").strip()
        if is_blank(answer):
            return Score("unavailable", reason="there is no claim to check")
        if is_blank(reference):
            return Score("unavailable", reason="there is no reference to check the answer against")
        return SecondPass(conversation(reference, answer.strip()), self.plan_of_pass)

    def score_pass(self, readouts: Mapping[str, Readout]) -> Score:
        readout = readouts.get(STATE)
        if not isinstance(readout, HiddenReadout):
            return Score("unavailable", reason="no hidden state of the second pass came back")
        if readout.status != "complete" or readout.values is None:
            return Score("unavailable", reason=readout.reason or f"hidden state of the second pass {readout.status}")
        if readout.values.shape != self.gain.shape:
            return Score("unavailable", reason="hidden state of the second pass has another size: another model?")
        logits = self.weight @ rms_norm(readout.values, self.gain, self.config.params.norm_eps) + self.bias
        if not np.isfinite(logits).all():
            return Score("unavailable", reason="hidden state is not finite")
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        details = tuple((label, float(share)) for label, share in zip(LABELS, shares, strict=True))
        return Score("scored", float(1.0 - shares[0]), details=details)


Read = Callable[[Sequence[Sequence[dict[str, Any]]], MiaSpec], list[Readouts]]
"""What ``MiaLLM.read`` does: conversations and one spec in, the readouts of their prompts out."""


def check_claims(detector: ScienceHallucination, read: Read, pairs: Sequence[tuple[str, str]]) -> list[Score]:
    """Scores of (reference, claim) pairs, offline: ``check_claims(detector, llm.read, pairs)`` with a ``MiaLLM`` that
    has a tap at the detector's layer."""
    asked = [detector.second_pass(claim, {REFERENCE: reference}) for reference, claim in pairs]
    conversations = [[dict(message) for message in one.messages] for one in asked if isinstance(one, SecondPass)]
    spec = MiaSpec(hidden=dict(detector.plan_of_pass.hidden))
    found = iter(read(conversations, spec) if conversations else [])
    return [one if isinstance(one, Score) else detector.score_pass(next(found).items) for one in asked]
