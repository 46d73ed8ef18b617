"""The formulas of readouts, against the same thing written out token by token."""

import math

import numpy as np
import pytest
import torch

from guard.mia.buffers import AttentionShape
from guard.mia.readouts import attention_weights


def slow_weights(query: np.ndarray, keys: np.ndarray, position: int, shape: AttentionShape) -> np.ndarray:
    """One head, one token, key by key."""
    logits = {}
    for t in range(position + 1):
        if shape.window is not None and position - t >= shape.window:
            continue
        logit = float(np.dot(query, keys[t])) * shape.scale
        logits[t] = shape.softcap * math.tanh(logit / shape.softcap) if shape.softcap else logit
    out = np.zeros(len(keys))
    total = sum(math.exp(x - max(logits.values())) for x in logits.values())
    for t, logit in logits.items():
        out[t] = math.exp(logit - max(logits.values())) / total
    return out


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (3, 1), (8, 1), (0, 9), (4, 5)])
def test_attention_is_the_models_own(first: int, tokens: int, window: int | None, softcap: float) -> None:
    shape = AttentionShape(query_heads=6, key_heads=2, head_size=8, scale=0.4, softcap=softcap, window=window)
    generator = torch.Generator().manual_seed(first)
    queries = torch.randn(tokens, 3, 8, generator=generator) * 2
    keys = torch.randn(first + tokens, 8, generator=generator) * 2
    got = attention_weights(queries, keys, first, shape)
    np.testing.assert_allclose(got.sum(dim=2).numpy(), 1.0, atol=1e-6)
    for n in range(tokens):
        for head in range(3):
            expected = slow_weights(queries[n, head].numpy(), keys.numpy(), first + n, shape)
            np.testing.assert_allclose(got[n, head].numpy(), expected, atol=1e-6)
