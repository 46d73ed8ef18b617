"""Every supported architecture, every layer and head, against transformers in float32 on tiny random models."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from guard.mia.engine_config import EngineConfig
from guard.mia.results import AttentionReadout, AttentionRowsReadout, QKReadout, Readouts, RowsReadout
from guard.mia.spec import MiaSpec
from tests.engine import oracle
from tests.engine.engines import engine
from tests.engine.tiny_models import ARCHITECTURES, MORE_ARCHITECTURES

LAYERS, HEADS = (0, 1, 2, 3), tuple((layer, head) for layer in (1, 2, 3) for head in range(4))
COMPILED = ("gemma2", "llama")
ALL = "MIA_ALL_ARCHITECTURES"
"""Environment variable that adds the rest: minutes more."""
REST = MORE_ARCHITECTURES if os.environ.get(ALL) else ()
REST_COMPILED = ("idefics3", "mixtral", "olmo2", "qwen3") if os.environ.get(ALL) else ()
CASES = [(name, False) for name in (*ARCHITECTURES, "idefics3", *REST)]
CASES += [(name, True) for name in (*COMPILED, *REST_COMPILED)]
# Lengths on both sides of the sliding windows (24) and of a step's tokens (128).
CONVERSATIONS = [
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello there " * n}] for n in (1, 9, 14)
]
SPEC = MiaSpec.model_validate(
    {
        "spans": {"instruction": "system", "data": "user.last", "first": {"tokens": [[0, 1]]}},
        "hidden": {f"h{layer}": {"layer": layer, "positions": "all"} for layer in LAYERS},
        "attention": {
            "last": {"heads": HEADS, "spans": ["instruction", "data", "first"], "weights": True},
            "mean": {"heads": HEADS, "spans": ["data"], "weights": True, "positions": {"span": "instruction"}},
            "rows": {"heads": HEADS, "spans": ["instruction", "data"], "weights": True, "positions": "generated"},
        },
    }
)
CONFIG = EngineConfig(
    hidden_layers=LAYERS, attention_heads=HEADS, max_hidden_rows_per_step=128, max_query_rows_per_step=256
)


def tokens_of(readouts: Readouts, span: str) -> list[int]:
    return [t for start, end in readouts.span_tokens[span] for t in range(start, end)]


@pytest.mark.parametrize(("architecture", "compiled"), CASES, ids=[f"{n}{'-compiled' * c}" for n, c in CASES])
def test_readouts_are_the_models_own(architecture: str, compiled: bool, tmp_path: Path) -> None:
    folder = oracle.save(architecture, tmp_path)
    with engine(folder, CONFIG, compiled=compiled) as llm:
        answers = llm.chat(CONVERSATIONS, SPEC, max_tokens=5, ignore_eos=True)
    # The last generated token is never fed to the model.
    fed = [[*answer.prompt_token_ids, *answer.token_ids[:-1]] for answer in answers]
    for answer, ids, truth in zip(answers, fed, oracle.read(folder, fed), strict=True):
        length = len(answer.prompt_token_ids)
        for layer in LAYERS:
            got, expected = answer.items[f"h{layer}"], truth.stream(layer)
            assert isinstance(got, RowsReadout)
            assert got.token_ids == tuple(ids)
            errors = np.linalg.norm(got.values - expected, axis=1)
            assert (errors <= 1e-4 * np.linalg.norm(expected, axis=1)).all()

        attention = np.stack([truth.attention[layer - 1][head] for layer, head in HEADS])
        instruction = tokens_of(answer.readouts[0], "instruction")
        last, mean, rows = answer.items["last"], answer.items["mean"], answer.items["rows"]
        assert isinstance(last, AttentionReadout)
        assert isinstance(mean, AttentionReadout)
        assert isinstance(rows, AttentionRowsReadout)
        np.testing.assert_allclose(last.weights, attention[:, length - 1, :length], atol=1e-4)
        np.testing.assert_allclose(mean.weights, attention[:, instruction, :length].mean(axis=1), atol=1e-4)
        np.testing.assert_allclose(rows.weights, attention[:, length:].transpose(1, 0, 2), atol=1e-4)
        assert (last.positions, mean.positions) == ((length - 1,), tuple(instruction))
        assert rows.positions == tuple(range(length, len(ids)))
        assert rows.token_ids == answer.token_ids[:-1]
        for item in (last, mean, rows):
            for span, mass in item.mass.items():
                tokens = tokens_of(answer.readouts[0], span)
                np.testing.assert_allclose(mass, item.weights[..., tokens].sum(axis=-1), atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "granite"])
def test_raw_queries_and_keys_give_the_models_attention(architecture: str, tmp_path: Path) -> None:
    """Everything that the attention of these needs is in the readout: queries, keys and their scale."""
    folder = oracle.save(architecture, tmp_path)
    spec = MiaSpec.model_validate(
        {
            "qk": {
                "all": {"heads": HEADS, "positions": "all"},
                "some": {"heads": [[3, 2], [1, 0], [3, 1]], "positions": {"tokens": [[2, 4], [6, 7]]}},
                "last": {"heads": [[2, 3]]},
            }
        }
    )
    with engine(folder, CONFIG) as llm:
        answers = llm.chat(CONVERSATIONS, spec, max_tokens=4, ignore_eos=True)
    fed = [[*answer.prompt_token_ids, *answer.token_ids[:-1]] for answer in answers]
    for answer, ids, truth in zip(answers, fed, oracle.read(folder, fed), strict=True):
        length = len(answer.prompt_token_ids)
        expected = {"all": (range(len(ids)), len(ids)), "some": ([2, 3, 6], length), "last": ([length - 1], length)}
        for name, (positions, keys) in expected.items():
            got = answer.items[name]
            assert isinstance(got, QKReadout)
            assert (got.status, got.reason) == ("complete", "")
            assert got.positions == tuple(positions)
            assert got.token_ids == tuple(ids[p] for p in positions)
            for layer in got.queries:
                heads = [head for at, head in got.heads if at == layer]
                assert got.keys[layer].shape[:2] == (keys, len(got.kv_heads[layer]))
                for column, head in enumerate(heads):
                    of_group = got.keys[layer][:, got.kv_heads[layer].index(head // 2)]
                    logits = got.queries[layer][:, column] @ of_group.T * got.scale[layer]
                    logits[np.arange(keys)[None, :] > np.asarray(positions)[:, None]] = -np.inf
                    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                    weights /= weights.sum(axis=1, keepdims=True)
                    rows = truth.attention[layer - 1][head][list(positions), :keys]
                    np.testing.assert_allclose(weights, rows, atol=1e-4)
