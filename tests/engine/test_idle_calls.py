"""Loaded and with taps in place, the plugin does nothing a step that grows with the batch, as long as nobody asks."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from vllm import SamplingParams

import guard.mia
from guard.mia.engine_config import EngineConfig
from tests.engine import engines, oracle

MOST_CALLS_A_STEP = 16
"""The wrappers around vLLM's methods, and what each looks up. Requests that come or go are not of a step."""


def calls_a_step(engine: Any, requests: int) -> Counter[str]:
    """Calls of our functions in one step that decodes ``requests`` requests which ask for nothing."""
    for n in range(requests):
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        engine.add_request(f"{requests}-{n}", {"prompt_token_ids": [5, 6, 7 + n]}, params)
    for _ in range(3):
        engine.step()
    calls: Counter[str] = Counter()
    folder = str(Path(guard.mia.__file__).parent)

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    engine.abort_request([f"{requests}-{n}" for n in range(requests)])
    while engine.has_unfinished_requests():
        engine.step()
    return calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))


def test_an_idle_step_costs_a_few_calls_whatever_the_batch(folder: Path) -> None:
    config = EngineConfig(hidden_layers=(1, 2), attention_heads=((1, 0), (3, 2)), steering_layers=(2,))
    with engines.engine(folder, config) as llm:
        one, many = (calls_a_step(llm.llm.llm_engine, requests) for requests in (1, 24))
    # Not of a step: blocks that fill up are hashed, at most one of each request.
    for calls in (one, many):
        calls.pop("block_keys.py:_extra_keys", None)
    # The taps themselves are part of the model; a graph or a compiler leaves nothing of their Python.
    taps = {name for name in one if name.startswith(("taps.py", "ops.py"))}
    outside = {name: count for name, count in one.items() if name not in taps}
    assert outside == {name: count for name, count in many.items() if name not in taps}
    assert 0 < sum(outside.values()) <= MOST_CALLS_A_STEP
    assert {name: many[name] for name in taps} == {name: one[name] for name in taps}
