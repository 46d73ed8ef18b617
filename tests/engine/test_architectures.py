"""Every supported architecture, every layer and head, against transformers in float32 on tiny random models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from guard.mia.engine_config import EngineConfig
from guard.mia.results import AttentionReadout, HiddenReadout
from guard.mia.spec import MiaSpec
from tests.engine import oracle
from tests.engine.engines import engine
from tests.engine.tiny_models import ARCHITECTURES

LAYERS, HEADS = (1, 2, 3), tuple((layer, head) for layer in (1, 2, 3) for head in range(4))
COMPILED = ("gemma2", "llama", "mixtral", "olmo2", "qwen3")
CASES = [(name, False) for name in ARCHITECTURES] + [(name, True) for name in COMPILED]
# Lengths on both sides of the sliding windows (24) and of a step's tokens (128).
CONVERSATIONS = [
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello there " * n}] for n in (1, 9, 14)
]


@pytest.mark.parametrize(("architecture", "compiled"), CASES, ids=[f"{n}{'-compiled' * c}" for n, c in CASES])
def test_readouts_are_the_models_own(architecture: str, compiled: bool, tmp_path: Path) -> None:
    folder = oracle.save(architecture, tmp_path)
    spec = MiaSpec.model_validate(
        {
            "spans": {"instruction": "system", "data": "user.last", "first": {"tokens": [[0, 1]]}},
            "hidden": {f"h{layer}": {"layer": layer} for layer in LAYERS},
            "attention": {"a": {"heads": HEADS, "spans": ["instruction", "data", "first"], "weights": True}},
        }
    )
    with engine(folder, EngineConfig(hidden_layers=LAYERS, attention_heads=HEADS), compiled=compiled) as llm:
        answers = llm.chat(CONVERSATIONS, spec, max_tokens=2)
    for answer, truth in zip(answers, oracle.read(folder, [a.prompt_token_ids for a in answers]), strict=True):
        readouts = answer.readouts[0]
        for layer in LAYERS:
            got, expected = readouts.items[f"h{layer}"], truth.hidden[layer - 1][-1]
            assert isinstance(got, HiddenReadout)
            assert np.linalg.norm(got.values - expected) <= 1e-4 * np.linalg.norm(expected)
        got = readouts.items["a"]
        assert isinstance(got, AttentionReadout)
        rows = np.stack([truth.attention[layer - 1][head, -1] for layer, head in HEADS])
        np.testing.assert_allclose(got.weights, rows, atol=1e-4)
        for span, ranges in readouts.span_tokens.items():
            tokens = [t for start, end in ranges for t in range(start, end)]
            expected = [truth.attention[layer - 1][head, -1, tokens].sum() for layer, head in HEADS]
            np.testing.assert_allclose(got.mass[span], expected, atol=1e-4)
