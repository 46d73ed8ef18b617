"""An engine with taps that nobody uses computes what vLLM computes, bit for bit, and never runs another's graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from guard.mia.engine_config import EngineConfig
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle

TAPS = EngineConfig(
    hidden_layers=(1, 2, 3),
    attention_heads=tuple((layer, head) for layer in (1, 2, 3) for head in range(4)),
    steering_layers=(1, 2, 3),
)
CONVERSATIONS = [[{"role": "user", "content": "tell me more " * n}] for n in (1, 3, 8, 20)]


def answers(llm: Any) -> list[tuple[tuple[int, ...], float]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
    outputs = llm.chat(CONVERSATIONS, params, use_tqdm=False)
    return [(tuple(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]


def assert_unchanged(got: list[Any], expected: list[Any], *, compiled: bool) -> None:
    if (compiled or engines.OVERRIDES.get("enforce_eager") is False) and torch.cuda.is_available():
        # Taps part the graph, and what the compiler fuses on either side rounds otherwise.
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        assert [logprob for _, logprob in got] == pytest.approx([logprob for _, logprob in expected], rel=1e-6)
    else:
        assert got == expected


def test_idle_taps_change_no_token_and_no_logprob(tmp_path: Path) -> None:
    folder = oracle.save("llama", tmp_path)
    with engines.vanilla(folder) as llm:
        expected = answers(llm)
    with engines.engine(folder, TAPS) as mia:
        assert_unchanged(answers(mia.llm), expected, compiled=False)


def test_compiled_idle_taps_change_nothing_and_no_cache_gives_a_graph_without_or_with_foreign_taps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    folder = oracle.save("llama", tmp_path / "model")
    read = MiaSpec.model_validate({"hidden": {"h": {"layer": 2}}})
    with engines.vanilla(folder, compiled=True) as llm:
        expected = answers(llm)
    for taps in (EngineConfig(hidden_layers=(2,)), TAPS):
        with engines.engine(folder, taps, compiled=True) as mia:
            assert_unchanged(answers(mia.llm), expected, compiled=True)
            got = mia.read(CONVERSATIONS, read)
            assert [readouts.items["h"].status for readouts in got] == ["complete"] * len(CONVERSATIONS)
            truth = oracle.read(folder, [a.prompt_token_ids for a in mia.chat(CONVERSATIONS, read, max_tokens=1)])
            for readouts, reading in zip(got, truth, strict=True):
                assert abs(readouts.items["h"].values - reading.hidden[1][-1]).max() < 1e-3
    with engines.vanilla(folder, compiled=True) as llm:
        assert answers(llm) == expected
