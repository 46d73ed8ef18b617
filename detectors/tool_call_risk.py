"""Tool-call risk: is the model about to call a tool because something it read told it to?

Owns one formula: a logistic regression on the state from which the model would begin a tool call. Which token that is:

- ``last_prompt``: the last prompt token of an agent's step. The score is there before the answer's first token, so that
  a rule can stop the call before it exists; this is what MIA's tool-call probe reads too.
- ``before_call``: the token in front of the first token of a call, found by the model's own token for beginning one
  (``<tool_call>`` and the like). It may be the last prompt token, when the model calls at once. Of several calls the
  riskiest counts. An answer without a call has no risk: 0.

Weights are a probe's, with scaling, principal components and calibration folded in when they were fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from detectors.base import CapturePlan, Score
from detectors.linear import LinearParams, LinearReader, load_linear, sigmoid
from detectors.model_config import ModelConfig, load_model_config
from guard.mia.results import FloatArray, Readout

NO_CALL = "the answer calls no tool"


class Params(LinearParams):
    at: Literal["last_prompt", "before_call"] = "last_prompt"
    """Which state is read."""
    call_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=16)] = ()
    """For ``before_call``: the tokens that begin a tool call of this model."""

    @model_validator(mode="after")
    def _calls_have_a_beginning(self) -> Self:
        if (self.at == "before_call") != bool(self.call_token_ids):
            raise ValueError("at before_call needs call_token_ids, and only it has them")
        return self


class ToolCallRiskConfig(ModelConfig):
    params: Params


class ToolCallRisk:
    kind = "tool_call_risk"

    def __init__(self, config: ToolCallRiskConfig, weight: FloatArray, bias: FloatArray) -> None:
        """weight: ``[1, layers, hidden_size]``, bias: ``[1]``."""
        self.config = config
        self.thresholds: Mapping[str, float] = config.threshold_values()
        params = config.params
        self.prompt = LinearReader(params.layers, weight, bias, "last_prompt", "prompt")
        self.answer = LinearReader(params.layers, weight, bias, "generated", "answer")

    @classmethod
    def load(cls, path: Path) -> ToolCallRisk:
        config = load_model_config(path, ToolCallRiskConfig)
        return cls(config, *load_linear(path.parent, config.params))

    def plan(self) -> CapturePlan:
        prompt = self.prompt.plan()
        if self.config.params.at == "last_prompt":
            return prompt
        answer = self.answer.plan()
        return CapturePlan(hidden={**prompt.hidden, **answer.hidden}, probes={**prompt.probes, **answer.probes})

    def computed(self, *, in_engine: bool) -> ToolCallRisk:
        other = copy(self)
        other.prompt = replace(self.prompt, in_engine=in_engine)
        other.answer = replace(self.answer, in_engine=in_engine)
        return other

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        prompt = self.prompt.read(readouts)
        if isinstance(prompt, Score):
            return prompt
        if self.config.params.at == "last_prompt":
            return Score("scored", float(sigmoid(prompt.logits[0, 0])))
        answer = self.answer.read(readouts)
        if isinstance(answer, Score):
            return answer
        # The state before the token at place i of the answer is that of the token at place i - 1.
        logits = np.concatenate([prompt.logits[:1, 0], answer.logits[:, 0]])
        calls = np.isin(answer.token_ids, self.config.params.call_token_ids)
        if not calls.any():
            return Score("scored", 0.0, reason=NO_CALL)
        return Score("scored", float(sigmoid(logits[:-1][calls].max())))
