"""Reranking when many ask at once: every query of a large step is read."""

from __future__ import annotations

from pathlib import Path

from guard.mia.engine_config import EngineConfig
from guard.uses import rerank
from guard.uses.asking import offline
from tests.engine import engines, oracle

CHOSEN = ((1, 2), (3, 0), (3, 3))


def test_queries_that_fill_a_whole_step_are_all_read(tmp_path: Path) -> None:
    """As many of them at once as the step has tokens, whatever else is in it."""
    folder = oracle.save("granite", tmp_path / "model")
    config = EngineConfig(attention_heads=CHOSEN, max_query_rows_per_step="tokens", max_host_bytes=2**30)
    with engines.engine(folder, config, max_model_len=2048, max_num_batched_tokens=8192) as llm:
        spec, query = rerank.spec_for(CHOSEN, 2), "passport visa office " * 20
        told = offline(llm)([(rerank.prompt(f"{i} {query}", ["a passport", "b dog"]), spec) for i in range(16)])
    assert {(one.prompt.items["attention"].status, one.prompt.items["attention"].reason) for one in told} == {
        ("complete", "")
    }
    assert sum(len(one.prompt.items["attention"].positions) for one in told) > 2 * 2048  # type: ignore[union-attr]
