"""The quickstarts of MIA's README run with only the import changed, and what they get is what the aperture reads.

Their text is MIA's, but for the import, the model's name and the files that a test can have: a tiny random model.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from guard.machine import free_port
from guard.mia import MiaClient, MiaLLM, PluginRegistry
from guard.mia.analyzers.probes import MissingReadoutError
from guard.mia.compat import CompatError
from guard.mia.spec import MiaSpec, SpecError
from tests.engine import engines, oracle
from tests.engine.tiny_models import save_tiny_model
from tests.servers import START_LIMIT_S, end, wait_ready

pytestmark = pytest.mark.engine

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_CI_ENV": "1",  # compiled graphs are traced, and not turned into C++: seconds instead of minutes
}

QWEN, PHI = "Qwen/Qwen2-1.5B-Instruct", "microsoft/Phi-3-mini-4k-instruct"

CAPTURE_OFFLINE = """
import multiprocessing as mp
import os

from vllm import SamplingParams

from mia import MiaLLM

if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    llm = MiaLLM(model="Qwen/Qwen2-1.5B-Instruct", worker_name="capture_hs",
                 analyzer_name="hidden_states",
                 config_file="model_configs/hidden_states/Qwen2-1.5B-Instruct.json",
                 gpu_memory_utilization=0.7, max_model_len=2048)
    out = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=10))
    stats = llm.analyze(analyzer_spec={"reduce": "none"}, probes=out[0].probes)
    for layer, tensors in sorted(stats["hidden_states"].items()):
        print(layer, tuple(tensors[0].shape))
    llm.llm_engine.engine_core.shutdown()
"""

STEER_OFFLINE = """
import multiprocessing as mp
import os

from vllm import SamplingParams

from mia import MiaLLM

if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    llm = MiaLLM(model="microsoft/Phi-3-mini-4k-instruct", worker_name="steer",
                 config_file="model_configs/activation_steer/Phi-3-mini-4k-instruct.json",
                 gpu_memory_utilization=0.7, max_model_len=4096)
    steer = {"method": "add_vector", "coefficient": 10}   # overrides the config's steering keys
    sp = SamplingParams(temperature=0.0, max_tokens=100, extra_args={"steer": steer})
    print(llm.generate("Write three bullet points about tea.", sp)[0].outputs[0].text)
    llm.llm_engine.engine_core.shutdown()
"""

CAPTURE_SERVER = """
VLLM_WORKER_MULTIPROC_METHOD=spawn MIA_WORKER=hidden_states
    vllm serve Qwen/Qwen2-1.5B-Instruct
    --max-model-len 2048 --port 8770 --gpu-memory-utilization 0.8
"""

CAPTURE_SERVED = """
from mia import MiaClient

client = MiaClient(base_url="http://localhost:8770/v1", analyzer_name="hidden_states",
                   config_file="model_configs/hidden_states/Qwen2-1.5B-Instruct.json")
client.generate(messages=[{"role": "user", "content": "The capital of France is"}],
                model="Qwen/Qwen2-1.5B-Instruct", max_tokens=10, temperature=0.0)
stats = client.analyze(analyzer_spec={"reduce": "none"})
for layer, tensors in sorted(stats["hidden_states"].items()):
    print(layer, tuple(tensors[0].shape))
"""

STEER_SERVER = """
VLLM_WORKER_MULTIPROC_METHOD=spawn MIA_WORKER=steer
    MIA_STEER_CONFIG=model_configs/activation_steer/Phi-3-mini-4k-instruct.json
    vllm serve microsoft/Phi-3-mini-4k-instruct --max-model-len 4096 --port 8770
"""
"""MIA's command, and where our server finds the vector that requests then name."""

STEER_SERVED = """
import json

import openai

with open("model_configs/activation_steer/Phi-3-mini-4k-instruct.json") as f:
    steer = {**json.load(f)["steering"], "method": "add_vector", "coefficient": 10}
client = openai.OpenAI(base_url="http://localhost:8770/v1", api_key="EMPTY")
response = client.chat.completions.create(
    model="microsoft/Phi-3-mini-4k-instruct", max_tokens=100, temperature=0.0,
    messages=[{"role": "user", "content": "Write three bullet points about tea."}],
    extra_body={"vllm_xargs": {"steer": json.dumps(steer)}})
print(response.choices[0].message.content)
"""

HIDDEN_CONFIG = "model_configs/hidden_states/Qwen2-1.5B-Instruct.json"
STEER_CONFIG = "model_configs/activation_steer/Phi-3-mini-4k-instruct.json"
QK_CONFIG = "model_configs/attention_tracker/tiny.json"
VECTOR_PATH = "steering_vectors/phi3_format.pt"
PROMPT, TEA = "The capital of France is", "Write three bullet points about tea."
TEA_CHAT = [{"role": "user", "content": TEA}]
AVG_PROJ, STEERED_LAYER = 3.0, 1


@dataclass(frozen=True)
class Checkout:
    """A folder as MIA's repository root is: configs and a vector where the quickstarts look for them."""

    folder: Path
    model: Path
    vector: np.ndarray

    def text(self, quickstart: str) -> str:
        """With our import and our model."""
        text = quickstart.replace(QWEN, str(self.model)).replace(PHI, str(self.model))
        return re.sub(r"^from mia import", "from guard.mia import", text, flags=re.MULTILINE)

    def run(self, code: str, **environment: str) -> str:
        (self.folder / "quickstart.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "quickstart.py"],
            cwd=self.folder,
            env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR", **environment},  # its log goes to stdout
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    folder = tmp_path_factory.mktemp("checkout")
    model = save_tiny_model("llama", tmp_path_factory.mktemp("tiny-llama"))
    architecture = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**architecture, "max_position_embeddings": 4096}))
    vector = torch.randn(128, generator=torch.Generator().manual_seed(1))
    vector /= vector.norm()
    configs = {
        HIDDEN_CONFIG: {"model_info": {"name": QWEN}, "hidden_states": {"layers": [1, 3], "mode": "last_token"}},
        STEER_CONFIG: {
            "steering": {
                "method": "adjust_rs",
                "coefficient": 1.0,
                "optimal_layer": STEERED_LAYER,
                "vector_path": VECTOR_PATH,
                "apply_at_all_positions": True,
            }
        },
        QK_CONFIG: {
            "hookq": {"hookq_mode": "last_token"},
            "params": {"important_heads": [[0, 1], [2, 0], [2, 3]]},
            "hidden_states": {"layers": [2], "mode": "all_tokens"},
        },
    }
    for name, config in configs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(config))
    (folder / VECTOR_PATH).parent.mkdir()
    torch.save({"dir": vector.numpy(), "avg_proj": np.float32(AVG_PROJ)}, folder / VECTOR_PATH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        yield Checkout(folder, model, vector.numpy())


@pytest.fixture(scope="module")
def reference(checkout: Checkout) -> Iterator[MiaLLM]:
    """One engine with all three uses, through MIA's constructor."""
    both = {
        **json.loads((checkout.folder / QK_CONFIG).read_text()),
        **json.loads((checkout.folder / STEER_CONFIG).read_text()),
    }
    Path("all.json").write_text(json.dumps(both))
    arguments = {**engines.DEFAULTS, "enforce_eager": True, "max_num_seqs": 8}
    with (
        engines.in_process(),
        MiaLLM(
            checkout.model,
            worker_name="capture_hs,capture_qk,steer",
            analyzer_name="attn_tracker",
            config_file="all.json",
            hook_dir="runs",
            **arguments,
        ) as llm,
    ):
        yield llm


# Offline


def test_the_offline_capture_quickstart_prints_the_layers_that_were_asked_for(checkout: Checkout) -> None:
    assert checkout.run(checkout.text(CAPTURE_OFFLINE)) == "1 (128,)\n3 (128,)\n"


def test_the_offline_steering_quickstart_prints_the_steered_answer(checkout: Checkout) -> None:
    in_our_words = STEER_OFFLINE.replace('{"steer": steer}', repr({"mia": ADD_TEN.to_wire()})).replace(
        "    llm.llm_engine",
        f'    print("plain", llm.generate({TEA!r}, sp, use_hook=False)[0].outputs[0].text)\n    llm.llm_engine',
    )
    # As one process: in the words of the quickstart it is as users run it.
    ours = checkout.run(checkout.text(in_our_words), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    steered, plain = ours.split("plain ")
    assert steered.rstrip("\n") != plain.rstrip("\n")
    assert checkout.run(checkout.text(STEER_OFFLINE)) == steered


ADD_TEN = MiaSpec.model_validate(
    {"steer": [{"vector": "phi3_format", "layer": STEERED_LAYER + 1, "coefficient": 10.0}]}
)
"""What the steering quickstarts ask for, in our own words."""


def read(llm: MiaLLM, prompt: Any = PROMPT, **extra_args: Any) -> list[Any]:
    """Five tokens after each prompt, with MIA's keys on top of the config's; not steered unless they say so."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, extra_args={"steer": False, **extra_args})
    return llm.generate(prompt, params)


def states(output: Any, layer: int = 2, request: int = 0) -> np.ndarray:
    values: np.ndarray = output.probes["hs_cache"][layer]["hidden_states"][request].numpy()
    return values


def truth(checkout: Checkout, output: Any, *pushes: oracle.Push) -> oracle.Reading:
    """transformers' own values for prompt and answer, up to the last token that was fed to the model."""
    tokens = (*output.prompt_token_ids, *output.outputs[0].token_ids[:-1])
    (reading,) = oracle.read(checkout.model, [tokens], *pushes)
    return reading


def assert_close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({"hs_mode": "last_token"}, -5),
        ({"hs_mode": "last_token", "hooks_on": "both"}, slice(-5, None)),
        ({"hs_mode": "last_token", "hooks_on": "decode"}, slice(-4, None)),
        ({"hs_mode": "all_tokens"}, slice(0, -4)),
        ({"hs_mode": "all_tokens", "hooks_on": "both"}, slice(0, None)),
    ],
)
def test_hidden_states_are_those_of_transformers_the_prompts_first_then_the_generated(
    checkout: Checkout, reference: MiaLLM, keys: dict[str, str], rows: Any
) -> None:
    (output,) = read(reference, output_hidden_states=[2], **keys)
    assert_close(states(output), truth(checkout, output).hidden[1][rows])


def test_the_config_says_what_is_read_and_the_first_output_has_the_whole_batch(
    checkout: Checkout, reference: MiaLLM
) -> None:
    prompts = [PROMPT, "Hello", {"prompt_token_ids": list(range(40, 60))}]
    outputs = read(reference, prompts)
    for i, output in enumerate(outputs):
        expected = truth(checkout, output).hidden[1][: len(output.prompt_token_ids)]
        assert_close(states(outputs[0], request=i), expected)
        assert_close(states(output, request=0), truth(checkout, outputs[i]).hidden[1][: len(expected)])
    assert [len(output.probes["hs_cache"][2]["hidden_states"]) for output in outputs] == [3, 1, 1]


def test_every_choice_has_its_entry(reference: MiaLLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=4, ignore_eos=True)
    params.extra_args = {"hooks_on": "both", "steer": False}
    (output,) = reference.generate(PROMPT, params)
    first, second = (states(output, request=i) for i in (0, 1))
    assert first.shape == second.shape
    np.testing.assert_allclose(first[: len(PROMPT)], second[: len(PROMPT)], rtol=1e-4, atol=1e-4)
    assert not np.allclose(first[len(PROMPT) :], second[len(PROMPT) :])


def test_without_hooks_nothing_is_read_or_steered(reference: MiaLLM, checkout: Checkout) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, extra_args={"steer": True})
    (plain,) = reference.generate(PROMPT, params, use_hook=False)
    assert plain.probes == {}
    params.extra_args["mia"] = ADD_TEN.to_wire()
    assert reference.generate(PROMPT, params, use_hook=False)[0].outputs[0].token_ids == plain.outputs[0].token_ids
    assert plain.outputs[0].token_ids == read(reference)[0].outputs[0].token_ids
    assert params.extra_args.keys() == {"steer", "mia"}


@pytest.mark.parametrize(
    ("section", "push"),
    [
        ({}, {"method": "project", "coefficient": 1.0, "target": AVG_PROJ}),
        ({"method": "add_vector", "coefficient": 4}, {"coefficient": 4.0}),
        (
            {"phase": "prefill", "positions": "last_token"},
            {"method": "project", "coefficient": 1.0, "target": AVG_PROJ},
        ),
        ({"apply_at_all_positions": False, "method": "add_vector", "coefficient": 4}, {"coefficient": 4.0}),
    ],
)
def test_steering_is_the_published_rule_on_the_full_stream_after_the_block(
    checkout: Checkout, reference: MiaLLM, section: dict[str, Any], push: dict[str, Any]
) -> None:
    (output,) = read(reference, steer=section, hs_mode="all_tokens", hooks_on="both")
    only_last = section.get("positions") == "last_token" or not section.get("apply_at_all_positions", True)
    where = (len(output.prompt_token_ids) - 1,) if only_last else None
    pushed = oracle.Push(STEERED_LAYER + 1, vector=checkout.vector, positions=where, **push)
    assert_close(states(output), truth(checkout, output, pushed).hidden[1])
    on_vector = states(output) @ checkout.vector
    if section == {}:
        np.testing.assert_allclose(on_vector, AVG_PROJ, rtol=1e-4)


@pytest.mark.parametrize(
    ("extra_args", "param"),
    [
        ({"steer": {"vector_path": "/etc/passwd"}}, "steer.vector_path"),
        ({"steer": {"optimal_layer": 3}}, "steer.optimal_layer"),
        ({"output_hidden_states": [1]}, "output_hidden_states"),
        ({"hook_dir": "/tmp/x"}, "hook_dir"),  # noqa: S108
    ],
)
def test_a_wrong_key_is_an_error_that_names_it_and_the_engine_goes_on(
    reference: MiaLLM, extra_args: dict[str, Any], param: str
) -> None:
    good = SamplingParams(max_tokens=2)
    with pytest.raises(SpecError) as caught:
        reference.generate([PROMPT, PROMPT], [good, SamplingParams(extra_args=extra_args)])
    assert caught.value.param == param
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        reference.generate([PROMPT, "x" * 2000], good)
    assert not reference.llm_engine.has_unfinished_requests()
    assert len(read(reference)) == 1


INPUT_RANGE = ((3, 9), (-8, -2))


def test_the_attention_tracker_scores_what_transformers_attention_gives(checkout: Checkout, reference: MiaLLM) -> None:
    outputs = read(reference, [PROMPT, TEA])
    spec = {"input_range": [INPUT_RANGE] * 2, "attn_func": "sum_normalize"}
    scores = reference.analyze(analyzer_spec=spec, probes=outputs[0].probes)["score"]
    by_score_capture = read(reference, [PROMPT, TEA], qk_capture="score")
    for i, output in enumerate(outputs):
        length = len(output.prompt_token_ids)
        attention = truth(checkout, output).attention
        rows = [attention[layer][head, length - 1, :length] for layer, head in ((0, 1), (2, 0), (2, 3))]
        (i0, i1), (d0, d1) = INPUT_RANGE
        expected = np.mean([row[i0:i1].sum() / (row[i0:i1].sum() + row[d0:d1].sum() + 1e-8) for row in rows])
        assert scores[i] == pytest.approx(expected, abs=1e-4)
    again = reference.analyze(analyzer_spec=spec, probes=by_score_capture[0].probes)["score"]
    assert again == pytest.approx(scores, abs=1e-4)


def test_queries_of_all_tokens_and_keys_have_mias_shapes(reference: MiaLLM) -> None:
    (output,) = read(reference, output_qk=[2], hookq_mode="all_tokens", hooks_on="both", output_hidden_states=False)
    assert output.probes.keys() == {"qk_cache"}
    entry = output.probes["qk_cache"][2]
    tokens = len(output.prompt_token_ids) + 4
    assert (entry["q"][0].shape, entry["k_all"][0].shape) == ((tokens, 4 * 32), (tokens, 2 * 32))
    with pytest.raises(SpecError, match="no tap"):
        read(reference, output_qk={"5": [0]})


def test_a_saved_run_is_analyzed_by_its_name(reference: MiaLLM) -> None:
    spec = {"input_range": INPUT_RANGE, "attn_func": "max"}
    params = SamplingParams(temperature=0.0, max_tokens=2, extra_args={"steer": False})
    reference.generate(PROMPT, params, save_to_disk=True, run_id="run-1")
    saved = reference.analyze(analyzer_spec=spec)
    reference.generate(TEA, params)
    assert reference.analyze(analyzer_spec=spec) != saved
    assert reference.analyze(analyzer_spec=spec, run_id="run-1") == saved
    assert {path.name for path in Path("runs/run-1").iterdir()} == {"readouts.json", "readouts.safetensors"}
    with pytest.raises(MissingReadoutError, match="run-2"):
        reference.analyze(analyzer_spec=spec, run_id="run-2")
    with pytest.raises(ValueError, match="no path"):
        reference.generate(PROMPT, params, save_to_disk=True, run_id="../run")
    with pytest.raises(CompatError, match="nothing was read"):
        reference.generate(PROMPT, params, use_hook=False, save_to_disk=True)


def test_sampling_parameters_may_be_named_and_ours_stays_as_it_was(reference: MiaLLM) -> None:
    (named,) = reference.generate(PROMPT, temperature=0.0, max_tokens=3)
    assert len(named.outputs[0].token_ids) <= 3
    assert reference.tokenizer.decode(named.prompt_token_ids) == PROMPT
    with pytest.raises(TypeError, match="by name"):
        reference.generate(PROMPT, SamplingParams(), max_tokens=3)
    (answer,) = reference.chat([TEA_CHAT], MiaSpec.model_validate({"hidden": {"h": {"layer": 2}}}), max_tokens=3)
    assert answer.items["h"].status == "complete"


# Served


@dataclass(frozen=True)
class Server:
    """``url`` ends in /v1."""

    url: str
    model: str
    key: str

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=self.key, max_retries=0)

    def text(self, xargs: dict[str, Any] | None = None, **fields: Any) -> str:
        return str(self.ask(xargs, **fields).choices[0].message.content)

    def ask(self, xargs: dict[str, Any] | None = None, **fields: Any) -> Any:
        body = {"model": self.model, "messages": TEA_CHAT, "max_tokens": 100, "temperature": 0.0, **fields}
        return self.openai.chat.completions.create(**body, extra_body={"vllm_xargs": xargs} if xargs else {})


@contextmanager
def server(checkout: Checkout, command: str, **environment: str) -> Iterator[Server]:
    """MIA's command, with the module that the CPU build has in place of ``vllm serve``, on a port that is free."""
    port = free_port()
    words = checkout.text(command).replace("8770", str(port)).split()
    start = words.index("vllm")
    given = dict(word.split("=", 1) for word in words[:start])
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *words[start + 2 :]]
    log = checkout.folder / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments,
            cwd=checkout.folder,
            env={**os.environ, **ENVIRONMENT, **given, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_ready(process, f"http://localhost:{port}/health", log)
        yield Server(f"http://localhost:{port}/v1", str(checkout.model), environment.get("VLLM_API_KEY", "EMPTY"))
    finally:
        end(process)


def test_the_served_capture_quickstart_prints_the_layers_that_were_asked_for(checkout: Checkout) -> None:
    with server(checkout, CAPTURE_SERVER) as started:
        code = checkout.text(CAPTURE_SERVED).replace("http://localhost:8770/v1", started.url)
        assert checkout.run(code) == "1 (128,)\n3 (128,)\n"


def test_the_served_steering_quickstart_prints_the_steered_answer(checkout: Checkout) -> None:
    with server(checkout, STEER_SERVER) as started:
        printed = checkout.run(checkout.text(STEER_SERVED).replace("http://localhost:8770/v1", started.url))
        steered, plain = started.text({"mia": ADD_TEN.to_wire()}), started.text()
        assert steered != plain
        assert printed.rstrip("\n") == steered.rstrip("\n")


EVERYTHING = """
MIA_WORKER=hidden_states,qk,steer MIA_STEER_CONFIG=model_configs/activation_steer/Phi-3-mini-4k-instruct.json
    MIA_APERTURE_DIR=captures VLLM_PLUGINS=mia
    vllm serve Qwen/Qwen2-1.5B-Instruct --max-model-len 512 --enforce-eager --dtype float32
    --port 8770
"""


@pytest.fixture(scope="module")
def served(checkout: Checkout) -> Iterator[Server]:
    """A server with all three uses, with a key and a folder for files."""
    with server(checkout, EVERYTHING, VLLM_API_KEY="a key of the tests") as started:
        yield started


def client_of(served: Server, config_file: str | None = QK_CONFIG, analyzer: str = "hidden_states") -> MiaClient:
    return MiaClient(served.url, analyzer_name=analyzer, config_file=config_file, api_key=served.key)


def test_a_clients_answers_are_those_of_the_engine_offline(checkout: Checkout, served: Server) -> None:
    client = client_of(served)
    answer = client.generate(messages=TEA_CHAT, model=served.model, max_tokens=5, temperature=0.0)
    (rows,) = client.analyze({"reduce": "none"})["hidden_states"][2]
    assert answer.probes is client.probes
    assert answer.usage.prompt_tokens == len(rows)
    tokens = client.tokenizer_for(served.model).apply_chat_template(TEA_CHAT, add_generation_prompt=True)
    ids = tokens["input_ids"] if not isinstance(tokens, list) else tokens
    (reading,) = oracle.read(checkout.model, [ids])
    assert_close(rows.numpy(), reading.hidden[1])
    as_tokens = client.generate_tokens(ids, served.model, max_tokens=2, temperature=0.0)
    assert_close(as_tokens.probes["hs_cache"][2]["hidden_states"][0].numpy(), reading.hidden[1])


def test_several_prompts_have_an_entry_each(checkout: Checkout, served: Server) -> None:
    client = client_of(served)
    client.generate_text([PROMPT, "Hello"], served.model, max_tokens=2, temperature=0.0)
    first, second = client.analyze()["hidden_states"][2]
    assert (len(first), len(second)) == (len(PROMPT), len("Hello"))


def test_without_a_config_all_layers_are_read(served: Server) -> None:
    client = client_of(served, config_file=None)
    client.generate(messages=TEA_CHAT, model=served.model, max_tokens=2)
    assert list(client.analyze({"reduce": "norm"})["hidden_states"]) == [1, 2, 3]


def test_the_attention_tracker_scores_over_http_as_offline(served: Server, reference: MiaLLM) -> None:
    spec = {"input_range": INPUT_RANGE, "attn_func": "sum_normalize"}
    client = client_of(served, analyzer="attn_tracker")
    client.generate_text(TEA, served.model, max_tokens=1, temperature=0.0)
    offline = reference.analyze(spec, probes=read(reference, TEA)[0].probes)
    assert client.analyze(spec)["score"] == pytest.approx(offline["score"], abs=1e-4)


def test_files_of_a_run_are_read_back_through_the_server(served: Server) -> None:
    client = client_of(served)
    inline = client.generate(messages=TEA_CHAT, model=served.model, max_tokens=2, temperature=0.0).probes
    answer = client.generate(
        messages=TEA_CHAT, model=served.model, max_tokens=2, temperature=0.0, save_to_disk=True, run_id="run-1"
    )
    assert "artifact" in answer.mia
    assert_close(
        answer.probes["hs_cache"][2]["hidden_states"][0].numpy(), inline["hs_cache"][2]["hidden_states"][0].numpy()
    )
    assert client.analyze(run_id="run-1")["hidden_states"].keys() == {2}
    with pytest.raises(CompatError, match="run-2"):
        client.analyze(run_id="run-2")


def test_a_client_may_steer_read_nothing_or_add_keys(served: Server) -> None:
    client = client_of(served)
    common: dict[str, Any] = {"messages": TEA_CHAT, "model": served.model, "max_tokens": 100, "temperature": 0.0}
    plain = client.generate(**common, capture=False)
    assert plain.probes == {}
    assert not hasattr(plain, "mia")
    steered = client.generate(**common, steer={"method": "add_vector", "coefficient": 10})
    assert steered.choices[0].message.content == served.text({"mia": ADD_TEN.to_wire()})
    assert steered.choices[0].message.content != plain.choices[0].message.content
    rows = client.generate(**common, extra_xargs={"hs_mode": "last_token"}).probes["hs_cache"][2]["hidden_states"]
    assert rows[0].shape == (128,)
    with pytest.raises(CompatError, match="stream"):
        client.generate(**common, stream=True)


@pytest.mark.parametrize(
    ("xargs", "param"),
    [
        ({"steer": "{"}, "steer"),
        ({"steer": '{"vector_path": "/etc/passwd"}'}, "steer.vector_path"),
        ({"steer": '{"vector_path": "steering_vectors/../steering_vectors/phi3_format.pt"}'}, "steer.vector_path"),
        ({"steer": '{"optimal_layer": 3}'}, "steer.optimal_layer"),
        ({"output_hidden_states": "[4]"}, "output_hidden_states"),
        ({"output_hidden_states": "true", "hs_mode": "some"}, "hs_mode"),
        ({"output_hidden_states": "true", "hook_dir": "/tmp/x"}, "hook_dir"),  # noqa: S108
        ({"output_qk": '{"0": [4]}'}, "output_qk"),
        ({"output_qk": "true", "mia": "{}"}, "output_qk"),
    ],
)
def test_a_wrong_key_is_a_400_that_names_it(served: Server, xargs: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.ask(xargs)
    assert caught.value.body["param"] == f"vllm_xargs.{param}"  # type: ignore[index]


def test_several_uses_of_one_request_in_a_stream(served: Server) -> None:
    xargs = {"steer": 1, "output_hidden_states": 1, "output_qk": "[0]", "hookq_mode": "last_token"}
    chunks = list(served.ask(xargs, stream=True, max_tokens=3))
    (event,) = (chunk for chunk in chunks if chunk.object == "mia.readouts" and chunk.readouts[0]["items"])
    assert list(event.readouts[0]["items"]) == [
        "hs.1.last_prompt",
        "hs.2.last_prompt",
        "hs.3.last_prompt",
        "qk.last_prompt",
    ]


def test_a_steering_server_without_a_vector_does_not_start_and_says_what_it_needs(checkout: Checkout) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkout.model)],
        env={**os.environ, **ENVIRONMENT, "MIA_WORKER": "steer"},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert done.returncode != 0
    assert "MIA_STEER_CONFIG" in done.stderr


def test_an_analyzer_of_ones_own_gets_the_probes(served: Server) -> None:
    class Count:
        """The smallest analyzer."""

        def __init__(self, hook_dir: Any, layer_to_heads: Any) -> None:
            self.layer_to_heads = layer_to_heads

        def analyze(self, analyzer_spec: Any, run_id: str | None = None, probes: Any = None) -> Any:
            return sorted(probes), self.layer_to_heads, run_id

    PluginRegistry.register_analyzer("count", Count)
    client = client_of(served, analyzer="count")
    client.generate(messages=TEA_CHAT, model=served.model, max_tokens=1, run_id="mine")
    assert client.analyze() == (["hs_cache", "qk_cache"], {0: [1], 2: [0, 3]}, "mine")
