"""From a policy to the engine's taps, and the pair as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from detectors.base import CapturePlan, EngineProbe, Score
from detectors.engine_probes import write_probes
from guard.data import data_folder, default_policy, steering_folder
from guard.engine_process import engine_command
from guard.machine import free_port
from guard.mia.engine_config import EngineConfig
from guard.mia.probes import load_probes
from guard.mia.results import Readout
from guard.mia.spec import AttentionCapture, HiddenCapture, SpanPositions
from guard.models import ResolvedModel
from guard.policy import bind, load_policy
from guard.proxy_server import StartError, listening_socket
from guard.serve import engine_config_for, engine_config_of, probes_for, run_until_signal
from guard.uses.rerank import load_reranker, spec_for
from tests.conftest import RunningPair
from tests.detectors.weights import write as write_detector
from tests.processes import started_by
from tests.proxy.conftest import write_probe

POLICY = """
version: 1
name: test
detectors:
  a: {kind: probe}
  b: {kind: attention_tracker}
rules:
  - {name: one, when: {detector: a, at_least: 0.5}, action: block}
  - {name: two, when: {detector: b, at_least: 0.5}, action: steer,
     steer: [{vector: calm, layer: 7, coefficient: 2.0}, {vector: calm, layer: 3, coefficient: 1.0}]}
"""


@dataclass(frozen=True)
class Planned:
    """A detector that only plans."""

    captures: CapturePlan
    kind: str = "planned"
    thresholds: Mapping[str, float] = field(default_factory=dict)

    def plan(self) -> CapturePlan:
        return self.captures

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        return Score("unavailable", reason="it only plans")


def planned_detectors() -> dict[str, Planned]:
    attention = AttentionCapture(heads=((5, 1), (2, 0)), spans=("data",))
    return {
        "a": Planned(CapturePlan(hidden={"x": HiddenCapture(layer=15), "y": HiddenCapture(layer=9)})),
        "b": Planned(CapturePlan(attention={"m": attention}, spans={"data": ("user",)})),
    }


def test_the_engine_gets_taps_for_what_the_policy_reads_and_steers_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    bound = bind(load_policy(tmp_path / "policy.yaml"), planned_detectors(), {"calm", "unused"})
    assert engine_config_for([bound], tmp_path, tmp_path) == EngineConfig(
        hidden_layers=(9, 15),
        attention_heads=((2, 0), (5, 1)),
        steering_layers=(3, 7),
        steering_vectors=("calm",),
        steering_folder=tmp_path,
    )


def test_the_engine_gets_taps_that_the_reranker_reads_beside_the_policys(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    bound = bind(load_policy(tmp_path / "policy.yaml"), planned_detectors(), {"calm"})
    reranker = load_reranker(data_folder("model_configs") / "core_reranker" / "SmolLM2-135M-Instruct.json")
    config = engine_config_for([bound], tmp_path, tmp_path, reranker)
    assert set(config.attention_heads) == {(2, 0), (5, 1), *reranker.heads}
    config.check(bound.spec)
    config.check(spec_for(reranker.heads, 40))
    assert config.max_query_rows_per_step == "tokens"
    printed = json.loads(engine_config_of("smollm2-135m", default_policy(), tmp_path / "probes", rerank=True))
    EngineConfig.model_validate(printed["mia"]).check(spec_for(reranker.heads, 1))


def test_the_engine_gets_taps_for_every_policy_that_may_judge_shadows_too(tmp_path: Path) -> None:
    bound = []
    for name, layer in (("one", 3), ("two", 9)):
        (tmp_path / "policy.yaml").write_text(
            POLICY.replace("name: test", f"name: {name}").replace("layer: 3", f"layer: {layer}")
        )
        bound.append(bind(load_policy(tmp_path / "policy.yaml"), planned_detectors(), {"calm"}))
    assert engine_config_for(bound, tmp_path, tmp_path).steering_layers == (3, 7, 9)


def test_serve_takes_calibrations_and_vectors_from_the_folder_of_the_setting(tmp_path: Path) -> None:
    write_probe(tmp_path / "configs" / "probe", 576)  # as wide as the model, which serve looks at
    vectors = steering_folder(tmp_path / "configs", "SmolLM2-135M-Instruct")
    vectors.mkdir(parents=True)
    (vectors / "mine.safetensors").touch()
    rule = "{name: x, when: {detector: a, at_least: 1}, action: steer, steer: [{vector: V, layer: 3, coefficient: 1}]}"
    policy = f"{{version: 1, name: test, detectors: {{a: {{kind: probe, config: tiny}}}}, rules: [{rule}]}}"
    bound = []
    for vector, layer in (("mine", 3), ("caution", 3), ("mine", 31)):
        (tmp_path / "policy.yaml").write_text(policy.replace("V", vector).replace("layer: 3", f"layer: {layer}"))
        command = [sys.executable, "-m", "guard", "serve", "--policy", str(tmp_path / "policy.yaml")]
        command += [
            "--set",
            f"model_configs={tmp_path / 'configs'}",
            "--ledger",
            str(tmp_path / "no" / "ledger"),
        ]
        (tmp_path / "no").touch()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        bound.append(done.stderr)
    # The first gets as far as the ledger; the second vector ships with the guard, and is not in this folder.
    assert "no steering vector" not in bound[0]
    assert "ledger" in bound[0]
    assert "no steering vector 'caution'; there are: mine" in bound[1]
    assert "policy test: rule x: steers at layer 31, and the model has 30 layers" in bound[2]


def test_a_gate_on_a_probe_of_the_engine_needs_an_engine_that_has_it(tmp_path: Path) -> None:
    gated = (
        POLICY.replace("1.0}]}", "1.0}], gate: {probe: drift, above: 1}}")
        .replace("2.0}", "2.0, phase: decode}")
        .replace("coefficient: 1.0}", "coefficient: 1.0, phase: decode}")
    )
    (tmp_path / "policy.yaml").write_text(gated)
    bound = bind(load_policy(tmp_path / "policy.yaml"), planned_detectors(), {"calm"})
    with pytest.raises(StartError, match="policy test has a gate on drift, a probe of the engine"):
        engine_config_for([bound], tmp_path, tmp_path)


def test_the_engine_accepts_every_request_that_the_policy_makes(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    bound = bind(load_policy(tmp_path / "policy.yaml"), planned_detectors(), {"calm"})
    engine_config_for([bound], tmp_path, tmp_path).check(bound.spec)


def test_the_engine_gets_the_probes_that_detectors_want_it_to_compute(tmp_path: Path) -> None:
    weight, bias = np.ones((1, 4), np.float32), np.zeros(1, np.float32)
    last = EngineProbe(9, weight, bias)
    each = EngineProbe(12, weight, bias, SpanPositions(span="data"))
    plan = CapturePlan(probes={"last": last, "each": each}, spans={"data": ("user",)})
    (tmp_path / "policy.yaml").write_text("{version: 1, name: test, detectors: {a: {kind: planned}}}")
    bound = bind(load_policy(tmp_path / "policy.yaml"), {"a": Planned(plan)})
    config = engine_config_for([bound], tmp_path, tmp_path / "probes")
    assert config == EngineConfig(
        probes={last.name: 9, each.name: 12}, probe_folder=tmp_path / "probes", max_hidden_rows_per_step="tokens"
    )
    config.check(bound.spec)
    write_probes(probes_for([bound]).values(), tmp_path / "probes")
    bank = load_probes(config.probe_folder, config.probes, 4, torch.device("cpu"))
    assert bank.logits(torch.ones(1, 4)).tolist() == [[4.0, 4.0]]
    other = EngineProbe(9, weight + 1, bias)
    assert other.name != last.name, "an engine with other weights refuses instead of answering with them"


def test_what_a_vllm_of_ones_own_needs_is_printed_and_its_probes_written(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    weight = {"weight": np.ones(4, np.float32), "bias": np.zeros(1, np.float32)}
    file = write_detector(tmp_path, "probe", weight, layers=[2], hidden_size=4)
    policy = f"{{version: 1, name: test, detectors: {{a: {{kind: probe, config: {file.name}}}}}}}"
    (tmp_path / "policy.yaml").write_text(policy)
    printed = json.loads(engine_config_of(str(tmp_path / "model"), tmp_path / "policy.yaml", tmp_path / "probes"))
    config = EngineConfig.model_validate(printed["mia"])
    assert config.hidden_layers == (2,), "a guard with other weights reads the states"
    (name,) = config.probes
    assert config.probes[name] == 2
    assert config.probe_folder == (tmp_path / "probes").resolve()
    assert (tmp_path / "probes" / f"{name}.safetensors").is_file()


def test_a_policy_without_detectors_needs_no_taps(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("{version: 1, name: empty}")
    assert engine_config_for([bind(load_policy(tmp_path / "policy.yaml"), {})], tmp_path, tmp_path) == EngineConfig()


def test_vllm_listens_on_loopback_and_the_callers_arguments_come_last(tmp_path: Path) -> None:
    model = ResolvedModel(str(tmp_path), "served", "key")
    config = EngineConfig(hidden_layers=(3,))
    extra = ("--max-model-len", "512")
    command = engine_command(model, config, port=1234, log_file=tmp_path / "log", extra_arguments=extra)
    arguments = list(command.arguments)
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[-2:] == list(extra)
    taps = json.loads(arguments[arguments.index("--additional-config") + 1])
    assert EngineConfig.model_validate(taps["mia"]) == config
    assert command.environment["HF_HUB_OFFLINE"] == "1"


def test_variables_of_the_caller_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    model = ResolvedModel(str(tmp_path), "served", "key")
    command = engine_command(model, EngineConfig(), port=1234, log_file=tmp_path / "log")
    assert "HF_HUB_OFFLINE" not in command.environment


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_taken_port_is_refused_with_the_option_that_changes_it(option: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(StartError, match=f"choose another with {option}$"),
        listening_socket("127.0.0.1", taken.getsockname()[1], option=option),
    ):
        pytest.fail("two servers would share a port")


@pytest.mark.parametrize("first", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
@pytest.mark.parametrize("second", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
def test_a_port_is_nobody_elses_before_its_server_runs(first: str, second: str) -> None:
    with (
        listening_socket(first, 0) as taken,
        pytest.raises(StartError, match=f"cannot listen on {second}:"),
        listening_socket(second, taken.getsockname()[1]),
    ):
        pytest.fail("two servers would share a port")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_context_managers_end_what_they_started(number: signal.Signals) -> None:
    ended: list[str] = []

    async def work() -> int:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
            return 1
        finally:
            await asyncio.sleep(0.01)
            ended.append("cleanly")

    assert run_until_signal(work()) == 0
    assert ended == ["cleanly"]


def test_a_broken_policy_is_refused_at_once_with_file_and_line(tmp_path: Path) -> None:
    policy = tmp_path / "broken.yaml"
    policy.write_text("version: 1\nname: broken\nmod: enforce\n")
    command = [sys.executable, "-m", "guard", "serve", "--policy", str(policy), "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{policy}:3: mod: " in done.stderr.replace("\n", "")


def post(url: str, body: object) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(  # noqa: S310 - a loopback address
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.engine
def test_while_vllm_is_dead_errors_have_openais_shape_and_it_comes_back_by_itself(running_pair: RunningPair) -> None:
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 4,
        "temperature": 0,
    }
    assert post(running_pair.proxy_url, body)[0] == 200
    (engine,) = started_by(running_pair.process.pid, "vllm")
    engine.kill()
    status, answer = post(running_pair.proxy_url, body)
    assert status in (502, 503)
    assert isinstance(answer["error"], dict)
    assert answer["error"]["code"] == "upstream_unavailable"
    deadline_s = time.monotonic() + 180
    while post(running_pair.proxy_url, body)[0] != 200:
        assert time.monotonic() < deadline_s, "the engine did not come back"
        time.sleep(1)


def test_answers_do_not_wait_for_the_clients_acknowledgement() -> None:
    async def accepted_without_delay() -> int:
        delays: list[int] = []

        async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            delays.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listening_socket("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            async with await asyncio.start_server(accept, sock=listener):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                await reader.read()
                writer.close()
        return delays[0]

    assert asyncio.run(accepted_without_delay()) == 1


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("serve", "--ledger", "/proc/nowhere/x"), "the ledger /proc/nowhere/x cannot be written", 1),
        (("proxy", "--upstream", "http://127.0.0.1:9", "--ledger", "/proc/nowhere/x"), "cannot be written", 1),
        (("serve", "--port", "99999"), "--port", 2),
        (("serve", "--engine-port", "0"), "--engine-port", 2),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_in_a_line_before_anything_slow_starts(
    arguments: tuple[str, ...], said: str, code: int
) -> None:
    port = () if "--port" in arguments or arguments[0] == "proxy" else ("--port", str(free_port()))
    command = [sys.executable, "-m", "guard", *arguments, *port]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code
    assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "starting vLLM" not in ended.stdout
