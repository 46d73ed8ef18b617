"""The attention tracker against its formula computed directly, and on whatever an engine may send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from detectors.attention_tracker import CAPTURE, AttentionTracker, AttentionTrackerConfig
from guard.mia.results import AttentionReadout, HiddenReadout
from tests.engine.tiny_models import save_tiny_model

HEADS = ((1, 0), (2, 3), (3, 1))
"""Layers from 1, as readouts have them; the file counts them from 0."""


def tracker(**more: Any) -> AttentionTracker:
    params = {"important_heads": [[layer - 1, head] for layer, head in HEADS], **more}
    return AttentionTracker(AttentionTrackerConfig.model_validate({"model_info": {"name": "tiny"}, "params": params}))


def readout(instruction: Any, data: Any, **changes: Any) -> AttentionReadout:
    mass = {"instruction": np.asarray(instruction, np.float32), "data": np.asarray(data, np.float32)}
    return AttentionReadout(**{"status": "complete", "heads": HEADS, "mass": mass, **changes})


def test_asks_for_its_heads_on_instruction_and_data_with_layers_counted_from_one() -> None:
    plan = tracker().plan()
    assert plan.attention[CAPTURE].heads == HEADS
    assert set(plan.attention[CAPTURE].spans) == {"instruction", "data"} == plan.spans.keys()


def test_equals_the_papers_formula_on_attention_that_transformers_computed(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        save_tiny_model("llama", tmp_path), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.randint(5, 60, (1, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    last = np.array([attentions[layer - 1][0, head, -1].numpy() for layer, head in HEADS])
    instruction, data = last[:, 2:9], last[:, 11:20]
    expected = 1 - np.mean([i.sum() / (i.sum() + d.sum() + 1e-8) for i, d in zip(instruction, data, strict=True)])

    score = tracker().score({CAPTURE: readout(instruction.sum(axis=1), data.sum(axis=1))})

    assert score.status == "scored"
    assert score.value == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.floats(0, 1, width=32), min_size=6, max_size=6))
def test_is_a_share_whatever_the_masses(masses: list[float]) -> None:
    score = tracker().score({CAPTURE: readout(masses[:3], masses[3:])})
    assert score.value is not None
    assert 0 <= score.value <= 1


def test_more_attention_on_the_data_is_a_higher_score() -> None:
    scores = [tracker().score({CAPTURE: readout([0.3] * 3, [data] * 3)}).value for data in (0.1, 0.2, 0.6)]
    assert scores == sorted(scores)
    assert len(set(scores)) == 3


@pytest.mark.parametrize(
    "readouts",
    [
        {},
        {CAPTURE: HiddenReadout("complete", 1, values=np.zeros(4, np.float32))},
        {CAPTURE: AttentionReadout("unavailable", HEADS, reason="span 'instruction': no such message")},
        {CAPTURE: readout([0.1] * 3, [0.1] * 3, status="dropped")},
        {CAPTURE: readout([0.1] * 2, [0.1] * 3)},
        {CAPTURE: readout([0.1] * 3, [0.1] * 3, mass={"instruction": np.ones(3, np.float32)})},
        {CAPTURE: readout([float("nan")] * 3, [0.1] * 3)},
    ],
)
def test_says_why_there_is_no_score_instead_of_raising(readouts: dict[str, Any]) -> None:
    score = tracker().score(readouts)
    assert score.status == "unavailable"
    assert score.value is None
    assert score.reason
