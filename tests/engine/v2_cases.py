"""What only the V2 runner does. Run by ``tests/mia/test_v2.py`` in the process that has it; not collected otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle

ALL_ROWS = MiaSpec.model_validate({"hidden": {"all": {"layer": 2, "positions": "all"}}})
CONVERSATIONS = [[{"role": "user", "content": "tell me more " * n}] for n in (2, 9, 5)]
CONFIG = EngineConfig(hidden_layers=(2,), max_hidden_rows_per_step=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[MiaLLM]:
    with engines.engine(folder, CONFIG) as llm:
        yield llm


def worker_of(llm: MiaLLM) -> Any:
    return llm.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def test_it_is_the_v2_runner(llm: MiaLLM) -> None:
    assert isinstance(worker_of(llm).model_runner, GPUModelRunner)


def test_a_batch_without_requests_between_two_steps_reads_and_disturbs_nothing(
    llm: MiaLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a data-parallel engine that have nothing to do run one while the others work."""
    expected = llm.chat(CONVERSATIONS, ALL_ROWS, max_tokens=4, ignore_eos=True)
    engine: Any = llm.llm.llm_engine
    step = engine.step

    def step_then_idle() -> Any:
        outputs = step()
        worker_of(llm).execute_dummy_batch()
        return outputs

    monkeypatch.setattr(engine, "step", step_then_idle)
    for got, wanted in zip(llm.chat(CONVERSATIONS, ALL_ROWS, max_tokens=4, ignore_eos=True), expected, strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.items["all"].positions == wanted.items["all"].positions
        np.testing.assert_allclose(got.items["all"].values, wanted.items["all"].values, rtol=1e-4, atol=1e-5)


def test_every_choice_of_a_request_gets_the_rows_of_its_own_tokens(llm: MiaLLM, folder: Path) -> None:
    answers = llm.chat(CONVERSATIONS, ALL_ROWS, n=2, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
    for answer in answers:
        readouts = [r for r in answer.readouts if r.stage == "final"]
        assert sorted(r.choice_index for r in readouts) == [0, 1]
        texts = [r.items["all"].token_ids for r in readouts]
        assert texts[0] != texts[1]
        for one, truth in zip(readouts, oracle.read(folder, texts), strict=True):
            got = one.items["all"]
            assert got.positions == tuple(range(len(answer.prompt_token_ids) + 5))
            assert np.linalg.norm(got.values - truth.hidden[1]) <= 1e-4 * np.linalg.norm(truth.hidden[1])


def test_preempted_requests_go_on_where_they_were(folder: Path) -> None:
    """This runner gets them as finished and then as new, with what they had generated as part of the prompt."""
    block_bytes = 128 * 2 * 2 * 32 * 4 * 3
    pool = {"kv_cache_memory_bytes": 8 * block_bytes, "disable_log_stats": False}
    conversations = [[{"role": "user", "content": f"{n} " + "tell me a story " * (3 + n)}] for n in range(5)]
    with engines.engine(folder, CONFIG, **pool) as llm:
        answers = llm.chat(conversations, ALL_ROWS, max_tokens=150, ignore_eos=True)
        assert next(m.value for m in llm.llm.get_metrics() if m.name == "vllm:num_preemptions") > 0
    texts = [answer.prompt_token_ids + answer.token_ids[:-1] for answer in answers]
    for answer, text, truth in zip(answers, texts, oracle.read(folder, texts), strict=True):
        got = answer.items["all"]
        assert (got.status, got.positions, got.token_ids) == ("complete", tuple(range(len(text))), text)
        assert np.linalg.norm(got.values - truth.hidden[1]) <= 1e-4 * np.linalg.norm(truth.hidden[1])
