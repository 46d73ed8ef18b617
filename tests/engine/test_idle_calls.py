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

TAPS = ("taps.py", "ops.py", "kernels.py", "control.py")

MOST_CALLS_A_STEP = 24
MOST_LINES_A_STEP = 60
"""The wrappers around vLLM's methods, and what each looks up. Requests that come or go are not of a step."""


def work_a_step(engine: Any, requests: int) -> tuple[Counter[str], Counter[str]]:
    """Calls of our functions in one step that decodes ``requests`` requests which ask for nothing, and the lines of
    them that ran, as often as they did: a loop shows, whatever it calls."""
    for n in range(requests):
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        engine.add_request(f"{requests}-{n}", {"prompt_token_ids": [5, 6, 7 + n]}, params)
    for _ in range(3):
        engine.step()
    calls: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    folder = str(Path(guard.mia.__file__).parent)

    def name_of(frame: FrameType) -> str:
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines[name_of(frame)] += 1
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        calls[name_of(frame)] += 1
        return line

    before = sys.gettrace()
    sys.settrace(call)
    try:
        engine.step()
    finally:
        sys.settrace(before)
    engine.abort_request([f"{requests}-{n}" for n in range(requests)])
    while engine.has_unfinished_requests():
        engine.step()
    return calls, lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))


def test_an_idle_step_costs_a_few_calls_whatever_the_batch(folder: Path) -> None:
    config = EngineConfig(hidden_layers=(1, 2), attention_heads=((1, 0), (3, 2)), steering_layers=(2,))
    with engines.engine(folder, config) as llm:
        one, many = (work_a_step(llm.llm.llm_engine, requests) for requests in (1, 24))
    for of_one, of_many, most in zip(one, many, (MOST_CALLS_A_STEP, MOST_LINES_A_STEP), strict=True):
        for counts in (of_one, of_many):
            # Not of a step: blocks that fill up are hashed, at most one of each request.
            counts.pop("block_keys.py:_extra_keys", None)
        assert of_one == of_many
        # The taps themselves are part of the model; a graph or a compiler leaves nothing of their Python.
        outside = [count for name, count in of_one.items() if not name.startswith(TAPS)]
        assert 0 < sum(outside) <= most
