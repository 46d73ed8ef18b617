"""The kernels: everything that ``test_ops`` asks of the ops, attention mass from a paged key cache, captured graphs.

Without a GPU they run in Triton's interpreter, in a process of its own: the switch is read when a kernel is defined.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

from guard.mia import ops
from guard.mia.ops import SHUT, GatherEntry, MassEntry
from tests.mia.test_ops import BANK, INTERPRETED, POOL, TOKENS, UNTOUCHED, WIDTH, Pass, block, random, steer, words_of

ROOT = Path(__file__).parent.parent.parent
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="runs on a GPU, or in Triton's interpreter as below"
)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="on a GPU, or in the process that it starts")
def test_all_cases_pass_in_tritons_interpreter() -> None:
    files = ["tests/mia/test_ops.py", "tests/mia/test_kernels.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-k", "not interpreter", *files]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout


@runs_kernels
def test_the_ops_are_the_kernels_and_mean_the_same_by_a_word() -> None:
    from guard.mia import kernels

    for name in vars(kernels):
        if hasattr(ops, name[1:]) and name.startswith("_") and name[1:].isupper():
            assert getattr(kernels, name).value == getattr(ops, name[1:]), name
    # Which the reference takes.
    with pytest.raises(ValueError, match=r"torch\.float32 without gaps"):
        steer(random(TOKENS, WIDTH), None, {0: [Pass(0)]}, DEVICE, bank=BANK.double())


@dataclass(frozen=True)
class Layer:
    """Attention of one layer: its keys, ``[tokens, key heads, head size]``, as if nothing were paged."""

    keys: torch.Tensor
    scale: float
    softcap: float = 0.0
    window: int = 0


def paged(keys: torch.Tensor, block_size: int, table: Sequence[int]) -> torch.Tensor:
    """A key cache as vLLM lays it out, ``[blocks, key heads, block size, 2 * head size]``, seen through a transpose."""
    tokens, heads, size = keys.shape
    cache = torch.full((max(table) + 2, block_size, heads, 2 * size), 1e4, dtype=keys.dtype)
    for token in range(tokens):
        cache[table[token // block_size], token % block_size, :, :size] = keys[token]
    return cache.to(DEVICE).transpose(1, 2)


def mass(layer: Layer, key_head: int, query: torch.Tensor, position: int, span: Sequence[tuple[int, int]]) -> float:
    """The oracle, token by token in float64."""
    logits = {}
    for token in range(position + 1):
        if layer.window == 0 or position - token < layer.window:
            x = layer.scale * float(query.double() @ layer.keys[token, key_head].double())
            logits[token] = layer.softcap * np.tanh(x / layer.softcap) if layer.softcap else x
    weights = {token: np.exp(x - max(logits.values())) for token, x in logits.items()}
    inside = sum(weight for token, weight in weights.items() if any(start <= token < end for start, end in span))
    return float(inside / sum(weights.values()))


SPANS: list[list[tuple[int, int]]] = [
    [(0, 5)], [(3, 4), (9, 30), (31, 33)], [(30, 200)], [], [(200, 210)], [(0, 10**6)]
]  # fmt: skip


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_span_mass_is_the_softmax_over_what_a_token_sees(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from guard.mia import kernels

    monkeypatch.setattr(kernels, "MASS_TILE", 64 * 32)  # 64 tokens, so that a context has several tiles
    sizes, tokens, block_size, table = (8, 24), 150, 7, [5, 0, 3, *range(6, 30)]
    made = [
        Layer(random(tokens, 2, sizes[0], dtype=dtype), scale=0.4),
        Layer(random(tokens, 2, sizes[1], dtype=dtype, seed=1), scale=1.3, softcap=2.0),
        Layer(random(tokens, 2, sizes[0], dtype=dtype, seed=2), scale=0.9, window=20),
    ]
    caches = [paged(layer.keys, block_size, table) for layer in made]
    tables = torch.tensor([[0] * len(table), table, [0] * len(table)], dtype=torch.int32, device=DEVICE)
    layers = [
        [cache.data_ptr(), *cache.stride()[:3], tables.data_ptr(), tables.stride(0), block_size, layer.window]
        for layer, cache in zip(made, caches, strict=True)
    ]
    layers = [[*fields, layer.keys.shape[2]] for fields, layer in zip(layers, made, strict=True)]
    queries = random(8, sizes[1] + 3, dtype=dtype, seed=3)[:, : sizes[1]]
    cases = [(0, 0, 149), (1, 1, 149), (2, 1, 149), (0, 1, 12), (2, 0, 12), (1, 0, 0)]  # layer, key head, position

    pool = [word for span in SPANS for word in (len(span), *(edge for pair in span for edge in pair))]
    entries = [
        MassEntry(i + 1, layer, head, 1, position, POOL, len(SPANS), 2 + i * len(SPANS))
        for i, (layer, head, position) in enumerate(cases)
    ]
    values = torch.full((len(cases) * len(SPANS) + 3,), UNTOUCHED, device=DEVICE)
    control = block(1, entries, pool).to(DEVICE)
    scales = torch.tensor([[layer.scale, layer.softcap] for layer in made], device=DEVICE)
    where = torch.tensor(layers, dtype=torch.int64, device=DEVICE)
    kernels.span_mass(queries.to(DEVICE), control, 1, len(entries), where, scales, values, dtype)

    expected = [
        mass(made[layer], head, queries[i + 1, : made[layer].keys.shape[2]], position, span)
        for i, (layer, head, position) in enumerate(cases)
        for span in SPANS
    ]
    np.testing.assert_allclose(values[2:-1].cpu().numpy(), expected, rtol=2e-5, atol=1e-6)
    assert values[[0, 1, -1]].tolist() == [UNTOUCHED] * 3
    kernels.span_mass(queries.to(DEVICE), control, 0, 0, where, scales, values, dtype)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_graph_does_what_the_control_block_says_at_its_replay(dtype: torch.dtype) -> None:
    entries = {0: [Pass(0)], 3: [Pass(1), Pass(2, gate=0, position=4)]}
    hidden, residual = random(TOKENS, WIDTH, dtype=dtype), random(TOKENS, WIDTH, dtype=dtype, seed=1)
    stream, beside = hidden.cuda(), residual.cuda()
    control, words = torch.zeros(200, dtype=torch.int32, device="cuda"), words_of(entries).cuda()
    gates, limit = torch.tensor([SHUT], dtype=torch.int32).cuda(), torch.tensor([inf]).cuda()
    doses, out, bank = torch.zeros(4, device="cuda"), torch.zeros(6, WIDTH, dtype=dtype, device="cuda"), BANK.cuda()

    def step() -> None:
        torch.ops.mia.steer_rows(stream, beside, control, 2, bank, limit, gates, doses)
        torch.ops.mia.gather_rows(stream, beside, control, 1, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    assert torch.equal(stream.cpu(), hidden)
    assert (out == 0).all()

    control[: len(words)] = words
    gathers = block(1, [GatherEntry(3, 5), GatherEntry(8, 0)])[POOL:].cuda()
    control[150 : 150 + len(gathers)] = gathers
    control[2:4] = torch.tensor([150, 2])
    for opened_at in (SHUT, 4):
        stream.copy_(hidden)
        gates.fill_(opened_at)
        graph.replay()
        expected = steer(hidden, residual, entries, "cpu", opened_at=[opened_at])
        torch.testing.assert_close(stream.cpu(), expected.hidden, atol=1e-5, rtol=2**-8)
        torch.testing.assert_close(doses[:3].cpu(), expected.doses[:3])
        assert torch.equal(out[[5, 0]], (stream + beside)[[3, 8]])
        assert (out[1:5] == 0).all()
