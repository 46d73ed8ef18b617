"""Two processes that each hold half of the heads read and steer as one does."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from guard.mia.buffers import AttentionShape
from guard.mia.engine_config import EngineConfig
from guard.mia.llm import Answer, MiaLLM
from guard.mia.results import AttentionReadout, AttentionRowsReadout, ProbeReadout, QKReadout, Readout, RowsReadout
from guard.mia.sharding import HeadShard
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle

HEADS = [(layer, head) for layer in (1, 2, 3) for head in range(4)]
# Heads of both ranks in one capture, of one rank alone, and in an order that is not theirs.
CAPTURES = {
    "spans": {"s": "system", "d": "user.last"},
    "hidden": {"h": {"layer": 3, "positions": "all"}},
    "probes": {"risk": {"probe": "risk", "positions": "generated"}},
    "attention": {
        "last": {"heads": HEADS, "spans": ["s", "d"], "weights": True},
        "some": {"heads": [(2, 3), (1, 0), (2, 1)], "spans": ["d"], "positions": {"span": "s"}},
        "rows": {"heads": [(3, 2), (3, 3)], "spans": ["s"], "weights": True, "positions": "generated"},
    },
    "qk": {"q": {"heads": [(1, 3), (1, 0), (2, 2)], "positions": "all"}},
}
GATED = {
    "steer": [
        {"vector": "push", "layer": 1, "coefficient": 1.5, "phase": "prefill"},
        # The mean over heads of both ranks decides, and has to on both.
        {
            "vector": "push",
            "layer": 2,
            "coefficient": 3.0,
            "phase": "decode",
            "gate": {"readout": "last", "span": "d", "above": 0.01},
        },
    ]
}
CONVERSATIONS = [
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello there " * n}] for n in (2, 15)
]


def run(llm: MiaLLM) -> list[Answer]:
    specs = [MiaSpec.model_validate(CAPTURES), MiaSpec.model_validate({**CAPTURES, **GATED})]
    pairs = [(conversation, spec) for spec in specs for conversation in CONVERSATIONS]
    return llm.chat([c for c, _ in pairs], [s for _, s in pairs], max_tokens=6, ignore_eos=True)


@pytest.mark.skipif(
    (torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1) < 2,
    reason="needs a core, or a card, for each process",
)
def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    folder = oracle.save("llama", tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    save_file({"vector": torch.randn(128, generator=generator)}, tmp_path / "push.safetensors")
    weights = {"weight": torch.randn(1, 128, generator=generator), "bias": torch.zeros(1)}
    save_file(weights, tmp_path / "risk.safetensors")
    config = EngineConfig(
        hidden_layers=(3,),
        attention_heads=tuple(HEADS),
        max_hidden_rows_per_step=256,
        max_query_rows_per_step=256,
        steering_layers=(1, 2),
        steering_folder=tmp_path,
        steering_vectors=("push",),
        probe_folder=tmp_path,
        probes={"risk": 2},
    )
    with engines.engine(folder, config) as llm:
        alone = run(llm)
    split = {**engines.DEFAULTS, "enforce_eager": True, "tensor_parallel_size": 2, **engines.OVERRIDES}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **engines.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with patch.dict(os.environ, environment), MiaLLM(folder, config, **split) as llm:
        together = run(llm)
    for a, b in zip(together, alone, strict=True):
        assert a.token_ids == b.token_ids
        assert a.items.keys() == b.items.keys() == {"h", "risk", "last", "some", "rows", "q"}
        for name, item in a.items.items():
            assert (item.status, item.reason) == ("complete", "")
            assert_same(item, b.items[name])
        one, other = a.readouts[-1].steering, b.readouts[-1].steering
        assert [r.steered_tokens for r in one] == [r.steered_tokens for r in other]
        assert [r.opened_at for r in one] == [r.opened_at for r in other]
    assert together[-1].readouts[-1].steering[1].opened_at == len(together[-1].prompt_token_ids)


def assert_same(a: Readout, b: Readout) -> None:
    assert a.positions == b.positions  # type: ignore[union-attr]
    close = {"rtol": 1e-3, "atol": 1e-4}
    if isinstance(a, RowsReadout) and isinstance(b, RowsReadout):
        np.testing.assert_allclose(a.values, b.values, **close)
    elif isinstance(a, ProbeReadout) and isinstance(b, ProbeReadout):
        np.testing.assert_allclose(a.logits, b.logits, rtol=1e-3, atol=1e-2)
    elif isinstance(a, QKReadout) and isinstance(b, QKReadout):
        assert (a.kv_heads, a.scale) == (b.kv_heads, b.scale)
        for layer in b.queries:
            np.testing.assert_allclose(a.queries[layer], b.queries[layer], **close)
            np.testing.assert_allclose(a.keys[layer], b.keys[layer], **close)
    else:
        assert isinstance(a, AttentionReadout | AttentionRowsReadout)
        assert isinstance(b, AttentionReadout | AttentionRowsReadout)
        for span, mass in b.mass.items():
            np.testing.assert_allclose(a.mass[span], mass, atol=1e-4)
        if b.weights is not None:
            np.testing.assert_allclose(a.weights, b.weights, atol=1e-4)


@pytest.mark.parametrize(("query_heads", "key_heads", "ranks"), [(8, 4, 2), (8, 2, 2), (8, 2, 4), (8, 1, 4), (4, 4, 4)])
def test_every_head_is_on_one_rank_and_every_key_head_answered_for_by_one(
    query_heads: int, key_heads: int, ranks: int
) -> None:
    shape = AttentionShape(query_heads // ranks, max(1, key_heads // ranks), 8, 1.0, 0.0, None)
    shards = [HeadShard(rank, ranks, max(1, ranks // key_heads)) for rank in range(ranks)]
    for head in range(query_heads):
        ((rank, local),) = [(s.rank, at) for s in shards if (at := s.query_head(head, shape.query_heads)) is not None]
        assert rank * shape.query_heads + local == head
        key_head = head * key_heads // query_heads
        assert {s.key_head_of(head, shape.group) for s in shards} == {key_head}
        # The rank that has the query also has its key, and looks at the right one.
        assert local // shape.group + rank * shape.key_heads // max(1, ranks // key_heads) == key_head
    for key_head in range(key_heads):
        assert len([s for s in shards if s.owned_key_head(key_head, shape.key_heads) is not None]) == 1


def test_parts_are_put_together_in_place_whatever_their_shapes() -> None:
    parts = [torch.ones(2, 3), torch.zeros(0, 4), torch.full((5,), 2.0)]
    HeadShard(0, 2, 1, lambda values: values.mul_(3)).merge(parts)
    assert [part.tolist() for part in parts] == [[[3.0] * 3] * 2, [], [6.0] * 5]
