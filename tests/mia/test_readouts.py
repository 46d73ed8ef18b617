"""The formulas of readouts, against the same thing written out token by token."""

import math

import numpy as np
import pytest
import torch

from guard.mia.buffers import AttentionShape
from guard.mia.readouts import attention_weights


def slow_weights(query: np.ndarray, keys: np.ndarray, shape: AttentionShape) -> np.ndarray:
    length = len(keys)
    out = np.zeros((shape.query_heads, length))
    for head in range(shape.query_heads):
        q = query[head * shape.head_size : (head + 1) * shape.head_size]
        logits = {}
        for t in range(length):
            if shape.window is not None and length - 1 - t >= shape.window:
                continue
            logit = float(np.dot(q, keys[t, head // shape.group])) * shape.scale
            logits[t] = shape.softcap * math.tanh(logit / shape.softcap) if shape.softcap else logit
        top = max(logits.values())
        total = sum(math.exp(x - top) for x in logits.values())
        for t, logit in logits.items():
            out[head, t] = math.exp(logit - top) / total
    return out


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_attention_of_the_last_token_is_the_models_own(length: int, window: int | None, softcap: float) -> None:
    shape = AttentionShape(query_heads=6, key_heads=2, head_size=8, scale=0.4, softcap=softcap, window=window)
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(6 * 8, generator=generator) * 2
    keys = torch.randn(length, 2, 8, generator=generator) * 2
    got = attention_weights(query, keys, shape)
    np.testing.assert_allclose(got.numpy(), slow_weights(query.numpy(), keys.numpy(), shape), atol=1e-6)
    np.testing.assert_allclose(got.sum(dim=1).numpy(), 1.0, atol=1e-6)
