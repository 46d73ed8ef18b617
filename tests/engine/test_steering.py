"""Gates, doses, the bank while the engine runs, and what steering leaves in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.results import ProbeReadout, RowsReadout
from guard.mia.spec import MiaSpec, SpecError
from guard.mia.vectors import VectorError
from tests.engine import engines, oracle

BLOCK_TOKENS = 32
PROMPT = [7 * i % 250 for i in range(3 * BLOCK_TOKENS)]
LIMIT = 0.5


@dataclass
class Engine:
    llm: MiaLLM
    folder: Path
    vectors: Path
    push: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    def generate(self, spec: dict[str, Any], prompt: list[int] = PROMPT, max_tokens: int = 8) -> Any:
        """vLLM's output for one prompt of token ids, with ``readouts``."""
        from vllm import SamplingParams

        from guard.mia.frontend import RequestContext, active

        asked = MiaSpec.model_validate(spec)
        self.llm.engine_config.check(asked, self.llm.vectors())
        context = RequestContext(asked, self.llm.vectors())
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        with active(context), self.llm._whole_batch() as add:
            request_id = add({"type": "token", "prompt_token_ids": prompt}, params, context)
        output = self.llm._run()[request_id]
        output.readouts = context.take()
        return output


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))
    vectors, probes = tmp_path_factory.mktemp("vectors"), tmp_path_factory.mktemp("probes")
    generator = torch.Generator().manual_seed(1)
    push, weight, bias = (torch.randn(size, generator=generator) for size in ((128,), (2, 128), (2,)))
    save_file({"vector": push}, vectors / "push.safetensors")
    save_file({"vector": -push}, vectors / "pull.safetensors")
    save_file({"weight": weight, "bias": bias}, probes / "risk.safetensors", {"layer": "2"})
    config = EngineConfig(
        hidden_layers=(2, 3),
        attention_heads=((1, 0), (2, 1)),
        max_hidden_rows_per_step=256,
        steering_layers=(1, 2),
        steering_folder=vectors,
        steering_vectors=("push",),
        max_steering_vectors=2,
        max_relative_dose=LIMIT,
        probe_folder=probes,
        probes={"risk": 2},
    )
    with engines.engine(folder, config, block_size=BLOCK_TOKENS) as llm:
        yield Engine(llm, folder, vectors, push.numpy(), weight.numpy(), bias.numpy())


def steer(**more: Any) -> dict[str, Any]:
    return {"vector": "push", "layer": 1, "coefficient": 0.05, "phase": "decode", **more}


ALL = {"positions": "all"}


def test_a_probes_logits_are_its_weights_on_the_models_own_states(engine: Engine) -> None:
    output = engine.generate({"probes": {"risk": {"probe": "risk", **ALL}, "last": {"probe": "risk"}}})
    ids = [*PROMPT, *output.outputs[0].token_ids[:-1]]
    (truth,) = oracle.read(engine.folder, [ids])
    logits = truth.hidden[1] @ engine.weight.T + engine.bias
    prompt, final = output.readouts
    last, rows = prompt.items["last"], final.items["risk"]
    assert isinstance(last, ProbeReadout)
    assert isinstance(rows, ProbeReadout)
    assert (last.positions, rows.positions) == ((len(PROMPT) - 1,), tuple(range(len(ids))))
    assert rows.token_ids == tuple(ids)
    np.testing.assert_allclose(rows.logits, logits, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(last.logits, rows.logits[[len(PROMPT) - 1]], rtol=1e-4, atol=1e-4)


def test_a_gate_lets_steering_in_after_the_step_that_crosses_it_and_not_before(engine: Engine) -> None:
    reading = {"probes": {"risk": {"probe": "risk", "positions": "generated"}}, "hidden": {"h": {"layer": 3, **ALL}}}
    plain = engine.generate(reading)
    logits = plain.readouts[-1].items["risk"].logits[:, 0]
    # A threshold that the third generated token is the first to cross, from whichever side.
    first = 2
    low, high = max(logits[:first]), min(logits[:first])
    gate = {"above": float((low + logits[first]) / 2)} if logits[first] > low else None
    if gate is None and logits[first] < high:
        gate = {"below": float((high + logits[first]) / 2)}
    if gate is None:
        first = int(np.argmax(logits))
        gate = {"above": float((np.sort(logits)[-2] + logits[first]) / 2)}
    gated = engine.generate({**reading, "steer": [steer(gate={"readout": "risk", **gate})]})
    opened_at = len(PROMPT) + first + 1
    (report,) = gated.readouts[-1].steering
    assert report.opened_at == opened_at
    assert report.steered_tokens == len(PROMPT) + 7 - opened_at
    a, b = plain.readouts[-1].items["h"], gated.readouts[-1].items["h"]
    np.testing.assert_array_equal(a.values[:opened_at], b.values[:opened_at])
    assert not np.allclose(a.values[opened_at], b.values[opened_at], atol=1e-3)
    pushed = oracle.Push(1, 0.05, engine.push, positions=tuple(range(opened_at, len(PROMPT) + 7)))
    (truth,) = oracle.read(engine.folder, [[*PROMPT, *gated.outputs[0].token_ids[:-1]]], pushed)
    errors = np.linalg.norm(b.values - truth.hidden[2], axis=1)
    assert (errors <= 1e-4 * np.linalg.norm(truth.hidden[2], axis=1)).all()


def test_a_gate_that_is_not_crossed_changes_nothing_and_one_crossed_by_the_prompt_steers_from_the_first_token(
    engine: Engine,
) -> None:
    spans = {"spans": {"head": {"tokens": [[0, 8]]}}}
    focus = {"attention": {"focus": {"heads": [[1, 0], [2, 1]], "spans": ["head"]}}}
    plain = engine.generate({})
    shut = engine.generate(
        {**spans, **focus, "steer": [steer(gate={"readout": "focus", "span": "head", "above": 1.1})]}
    )
    assert shut.outputs[0].token_ids == plain.outputs[0].token_ids
    assert shut.readouts[-1].steering[0].opened_at is None
    assert shut.readouts[-1].steering[0].steered_tokens == 0
    wide = steer(gate={"readout": "focus", "span": "head", "below": 1.1})
    opened = engine.generate({**spans, **focus, "steer": [wide]})
    ungated = engine.generate({"steer": [steer()]})
    assert opened.readouts[-1].steering[0].opened_at == len(PROMPT)
    assert opened.outputs[0].token_ids == ungated.outputs[0].token_ids


def test_the_dose_is_reported_and_kept_below_the_engines_limit(engine: Engine) -> None:
    (truth,) = oracle.read(engine.folder, [PROMPT])
    streams = np.linalg.norm(truth.hidden[0], axis=1)
    for coefficient in (0.01, 50.0):
        asked = steer(coefficient=coefficient, phase="prefill")
        output = engine.generate({"steer": [asked], "hidden": {"h": {"layer": 2, "positions": "prompt"}}}, max_tokens=1)
        (report,) = output.readouts[-1].steering
        doses = coefficient * np.linalg.norm(engine.push) / streams
        assert report.relative_dose == pytest.approx(doses.max(), rel=1e-3)
        assert (report.steered_tokens, report.limited_tokens) == (len(PROMPT), int((doses > LIMIT).sum()))
    # The stronger one everywhere: shortened to exactly the limit, which the next layer's stream shows.
    unit = engine.push / np.linalg.norm(engine.push)
    pushes = [
        oracle.Push(1, float(LIMIT * streams[p]), unit.astype(np.float32), positions=(p,)) for p in range(len(PROMPT))
    ]
    (limited,) = oracle.read(engine.folder, [PROMPT], *pushes)
    got = output.readouts[0].items["h"]
    assert isinstance(got, RowsReadout)
    assert np.linalg.norm(got.values - limited.hidden[1]) <= 1e-4 * np.linalg.norm(limited.hidden[1])


def test_vectors_come_and_go_while_the_engine_runs_and_never_under_another_ones_name(engine: Engine) -> None:
    pull = {"steer": [steer(vector="pull", phase="both")]}
    with pytest.raises(SpecError, match="pull"):
        engine.generate(pull)
    engine.llm.load_vector("pull")
    first = engine.generate(pull)
    save_file({"vector": torch.randn(128)}, engine.vectors / "third.safetensors")
    with pytest.raises(VectorError, match="full") as full:
        engine.llm.load_vector("third")
    assert full.value.refusal == "full"
    # Another vector under the same name: blocks that the old one steered must not be read.
    save_file({"vector": torch.from_numpy(engine.push)}, engine.vectors / "pull.safetensors")
    engine.llm.load_vector("pull")
    again = engine.generate(pull)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == engine.generate({"steer": [steer(phase="both")]}).outputs[0].token_ids
    assert first.outputs[0].token_ids != again.outputs[0].token_ids
    engine.llm.evict_vector("pull")
    assert set(engine.llm.vectors()) == {"push"}
    for name, refusal in (("pull", "unknown"), ("no-such", "unknown")):
        with pytest.raises(VectorError) as unknown:
            engine.llm.evict_vector(name)
        assert unknown.value.refusal == refusal
    with pytest.raises(VectorError) as unusable:
        engine.llm.load_vector("no-such")
    assert unusable.value.refusal == "unusable"


@pytest.mark.parametrize(("phase", "first_id"), [("decode", 201), ("both", 202), ("prefill", 203)])
def test_blocks_are_shared_up_to_the_first_steered_token_and_no_further(
    engine: Engine, phase: str, first_id: int
) -> None:
    read = {"hidden": {"h": {"layer": 3}}}
    asked = {"steer": [steer(phase=phase, coefficient=0.2)], **read}
    prompt = [first_id, *PROMPT[1:]]
    long = 2 * BLOCK_TOKENS + 1
    cold = engine.generate(asked, prompt, long)
    assert cold.num_cached_tokens == 0
    # The same prompt, not steered: the last token is always computed, so its block is.
    plain = engine.generate(read, prompt, 2)
    whole_blocks = len(prompt) - BLOCK_TOKENS
    assert plain.num_cached_tokens == (whole_blocks if phase == "decode" else 0)
    # A second turn, with the steered answer in the prompt: what steering touched must be computed again.
    turn = [*prompt, *cold.outputs[0].token_ids, *PROMPT[:5]]
    unsteered = engine.generate(read, turn, 1)
    assert unsteered.num_cached_tokens == len(prompt)
    (truth,) = oracle.read(engine.folder, [turn])
    got = unsteered.readouts[0].items["h"].values
    assert np.linalg.norm(got - truth.hidden[2][-1]) <= 1e-4 * np.linalg.norm(truth.hidden[2][-1])
    # The same request again shares everything that was whole, and says the same.
    again = engine.generate(asked, prompt, long)
    assert again.num_cached_tokens == whole_blocks
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (31, 0), (32, 32), (70, 64)])
def test_blocks_before_the_first_token_that_is_read_come_from_the_cache_and_none_behind_it(
    engine: Engine, start: int, cached: int
) -> None:
    prompt = [204, *PROMPT[1:]]
    engine.generate({"hidden": {"h": {"layer": 3}}}, prompt, 1)
    output = engine.generate({"hidden": {"h": {"layer": 3, "positions": {"tokens": [[start, start + 20]]}}}}, prompt, 1)
    assert output.num_cached_tokens == cached
    rows = output.readouts[0].items["h"]
    assert isinstance(rows, RowsReadout)
    assert (rows.status, rows.positions) == ("complete", tuple(range(start, start + 20)))
    (truth,) = oracle.read(engine.folder, [prompt])
    expected = truth.hidden[2][start : start + 20]
    assert np.linalg.norm(rows.values - expected) <= 1e-4 * np.linalg.norm(expected)


def test_a_readout_that_outgrows_the_memory_fails_alone(engine: Engine) -> None:
    router = (
        engine.llm.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.mia.router
    )
    if not router.gathers_keys:
        pytest.skip("keys that are read from vLLM's cache take no memory of their own")
    before, router._max_host_bytes = router._max_host_bytes, 4 * len(PROMPT) * 2 * 2 * 32
    try:
        asked = {
            "attention": {"grows": {"heads": [[1, 0]], "weights": True, "positions": "generated"}},
            "hidden": {"h": {"layer": 3}},
        }
        output = engine.generate(asked, max_tokens=4)
    finally:
        router._max_host_bytes = before
    assert output.readouts[0].items["h"].status == "complete"
    assert (output.readouts[-1].items["grows"].status, router._host_bytes) == ("dropped", 0)
    assert "max_host_bytes" in output.readouts[-1].items["grows"].reason
