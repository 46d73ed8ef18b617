"""MIA's keys, configs, vectors, probes and analyzers mean what MIA's documentation says, or are refused by name."""

from __future__ import annotations

import inspect
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import ModelConfig as VllmModelConfig
from vllm.config import SchedulerConfig, VllmConfig
from vllm.config.model_arch import ModelArchitectureConfig
from vllm.engine.arg_utils import EngineArgs

from guard.mia import MiaClient, PluginRegistry
from guard.mia.analyzers.attn_tracker import AttentionTrackerAnalyzer
from guard.mia.analyzers.hidden_states import HiddenStatesAnalyzer
from guard.mia.analyzers.probes import MissingReadoutError, Probes, load_probes, probes_of
from guard.mia.artifacts import encode
from guard.mia.compat import (
    CompatConfig,
    CompatError,
    LoadedVector,
    ModelShape,
    SteeringSection,
    compat_from_environment,
    engine_config,
    parse_uses,
    read_model_config,
)
from guard.mia.compat_request import requested_spec
from guard.mia.compat_vectors import convert_vector
from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.results import AttentionReadout, HiddenReadout, QKReadout, Readouts, RowsReadout
from guard.mia.spec import MiaSpec, SpecError

LAYERS, HEADS = 3, 4
SHAPE = ModelShape(LAYERS, HEADS, hidden_row_bytes=256, max_tokens_per_step=2048, max_requests=64)
SECTION = SteeringSection(method="adjust_rs", optimal_layer=(1,), vector_path="vectors/tea.pt")
COMPAT = CompatConfig(
    uses=("hidden_states", "qk", "steer"),
    heads=HEADS,
    steering=SECTION,
    vectors={"tea": LoadedVector(paths=("vectors/tea.pt", "tea.pt"), avg_proj=-1.5), "plain": LoadedVector()},
    steering_folder=Path("/nowhere"),
)
TAPS = engine_config(COMPAT, SHAPE)


def spec(**keys: Any) -> MiaSpec:
    return requested_spec(keys, COMPAT, TAPS)


def refusal(**keys: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        spec(**keys)
    return caught.value


# Requests


@pytest.mark.parametrize("value", [[1, 3], (1, 3), "[1, 3]", [3, 1, 3]])
def test_hidden_states_are_asked_for_by_layers_that_count_from_one(value: Any) -> None:
    assert {capture.layer for capture in spec(output_hidden_states=value).hidden.values()} == {1, 3}


@pytest.mark.parametrize("value", [True, 1, "true"])
def test_true_means_every_layer_that_the_engine_reads(value: Any) -> None:
    captures = spec(output_hidden_states=value).hidden.values()
    assert [(capture.layer, capture.positions) for capture in captures] == [(n, "last_prompt") for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("mode", "when", "positions"),
    [
        ("last_token", "prefill", ["last_prompt"]),
        ("last_token", "decode", ["generated"]),
        ("last_token", "both", ["last_prompt", "generated"]),
        ("all_tokens", "prefill", ["prompt"]),
        ("all_tokens", "decode", ["generated"]),
        ("all_tokens", "both", ["all"]),
    ],
)
def test_mode_and_hooks_on_say_at_which_tokens(mode: str, when: str, positions: list[str]) -> None:
    asked = spec(output_hidden_states=[2], hs_mode=mode, output_qk=[1], hookq_mode=mode, hooks_on=when)
    assert [capture.positions for capture in asked.hidden.values()] == positions
    assert [capture.positions for capture in asked.qk.values()] == positions


@pytest.mark.parametrize("value", [{0: [1], 2: [3, 0]}, '{"0": [1], "2": [3, 0]}', [0, 2], "[0, 2]"])
def test_heads_are_asked_for_by_layers_that_count_from_zero_and_come_as_whole_layers(value: Any) -> None:
    (capture,) = spec(output_qk=value, hookq_mode="last_token").qk.values()
    assert capture.heads == tuple((layer, head) for layer in (1, 3) for head in range(HEADS))


def test_without_a_mode_queries_of_the_whole_prompt_are_read_as_mia_does() -> None:
    (capture,) = spec(output_qk=True).qk.values()
    assert (len(capture.heads), capture.positions) == (LAYERS * HEADS, "prompt")


def test_scores_are_attention_probabilities_of_the_last_token() -> None:
    (capture,) = spec(output_qk=[0], hookq_mode="last_token", qk_capture="score").attention.values()
    assert (capture.weights, capture.positions, len(capture.heads)) == (True, "last_prompt", HEADS)


@pytest.mark.parametrize("off", [False, 0, "false"])
def test_false_asks_for_nothing(off: Any) -> None:
    assert not spec(output_hidden_states=off, output_qk=off, steer=off).asks


def test_add_vector_takes_the_coefficient_and_a_layer_that_counts_from_zero() -> None:
    (steer,) = spec(steer={"method": "add_vector", "coefficient": 10, "optimal_layer": 0}).steer
    assert (steer.method, steer.coefficient, steer.layer, steer.vector) == ("add_vector", 10.0, 1, "tea")


def test_adjust_rs_brings_the_projection_to_the_vectors_own_target_whatever_the_coefficient() -> None:
    (steer,) = spec(steer=json.dumps({"coefficient": 7})).steer
    assert (steer.method, steer.target, steer.coefficient, steer.layer) == ("project", -1.5, 1.0, 2)


@pytest.mark.parametrize("value", [True, {}, "{}"])
def test_true_or_an_empty_section_means_the_operators(value: Any) -> None:
    (steer,) = spec(steer=value).steer
    assert (steer.vector, steer.layer) == ("tea", 2)


@pytest.mark.parametrize(("layers", "expected"), [("all", (1, 2, 3)), ([0, 2], (1, 3)), (2, (3,))])
def test_one_layer_several_or_all_are_steered(layers: Any, expected: tuple[int, ...]) -> None:
    assert tuple(steer.layer for steer in spec(steer={"optimal_layer": layers}).steer) == expected


@pytest.mark.parametrize(
    ("section", "phase", "positions"),
    [
        ({}, "both", "all"),
        ({"apply_at_all_positions": False}, "prefill", "last"),
        ({"phase": "decode"}, "decode", "all"),
        ({"positions": "last_token"}, "both", "last"),
        ({"phase": "prefill", "positions": "last_token"}, "prefill", "last"),
        ({"apply_at_all_positions": False, "phase": "both"}, "both", "all"),
    ],
)
def test_phase_and_positions_say_where_and_the_older_flag_where_they_do_not(
    section: dict[str, Any], phase: str, positions: str
) -> None:
    (steer,) = spec(steer=section).steer
    assert (steer.phase, steer.positions) == (phase, positions)


@pytest.mark.parametrize("path", ["vectors/tea.pt", "tea.pt", "tea", "tea.safetensors"])
def test_a_path_that_is_literally_a_loaded_vectors_counts_as_its_name(path: str) -> None:
    (steer,) = spec(steer={"vector_path": path}).steer
    assert steer.vector == "tea"


@pytest.mark.parametrize("path", ["/etc/passwd", "./vectors/tea.pt", "other/tea.pt", "vectors/../vectors/tea.pt", "x"])
def test_any_other_path_is_refused_with_the_reason(path: str) -> None:
    error = refusal(steer={"vector_path": path})
    assert error.param == "steer.vector_path"
    assert "no file is opened" in str(error)


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"output_hidden_states": "[1"}, "output_hidden_states"),
        ({"output_hidden_states": [0]}, "output_hidden_states"),
        ({"output_hidden_states": []}, "output_hidden_states"),
        ({"output_hidden_states": {"1": 2}}, "output_hidden_states"),
        ({"output_hidden_states": [9]}, "output_hidden_states"),
        ({"output_hidden_states": [True]}, "output_hidden_states"),
        ({"output_hidden_states": True, "hs_mode": "first_token"}, "hs_mode"),
        ({"output_hidden_states": True, "hooks_on": "sometimes"}, "hooks_on"),
        ({"output_hidden_states": True, "hook_dir": "/tmp/x"}, "hook_dir"),  # noqa: S108
        ({"output_hidden_states": True, "run_id": "../x"}, "run_id"),
        ({"output_hidden_states": True, "run_id": "."}, "run_id"),
        ({"output_hidden_states": True, "run_id": 7}, "run_id"),
        ({"output_hidden_states": True, "save_to_disk": True}, "save_to_disk"),
        ({"output_hidden_states": True, "save_to_disk": "maybe"}, "save_to_disk"),
        ({"output_qk": "x"}, "output_qk"),
        ({"output_qk": {"0": [99]}}, "output_qk"),
        ({"output_qk": {"0": []}}, "output_qk"),
        ({"output_qk": {"a": [1]}}, "output_qk"),
        ({"output_qk": [3]}, "output_qk"),
        ({"output_qk": True, "hookq_mode": "none"}, "hookq_mode"),
        ({"output_qk": True, "qk_capture": "scores"}, "qk_capture"),
        ({"output_qk": True, "qk_capture": "score"}, "qk_capture"),
        ({"output_qk": True, "score_head": 3}, "score_head"),
        ({"steer": "yes"}, "steer"),
        ({"steer": {"metod": "add_vector"}}, "steer.metod"),
        ({"steer": {"method": "spotlight"}}, "steer.method"),
        ({"steer": {"method": "add_vector"}}, "steer.coefficient"),
        ({"steer": {"method": "add_vector", "coefficient": 1e9}}, "steer.coefficient"),
        ({"steer": {"vector_path": "plain"}}, "steer.method"),
        ({"steer": {"optimal_layer": 3}}, "steer.optimal_layer"),
        ({"steer": {"optimal_layer": -1}}, "steer.optimal_layer"),
        ({"steer": {"optimal_layer": "some"}}, "steer.optimal_layer"),
        ({"steer": {"phase": "later"}}, "steer.phase"),
        ({"output_hidden_states": True, "mia": "{}"}, "output_hidden_states"),
    ],
)
def test_a_key_that_is_wrong_is_refused_by_its_name(keys: dict[str, Any], param: str) -> None:
    error = refusal(**keys)
    assert error.param == param
    assert str(error).startswith(param)


def test_more_than_a_request_may_ask_for_is_refused_by_the_key() -> None:
    large, compat = engine_config(COMPAT, ModelShape(300, 64, 256, 2048, 64)), COMPAT.model_copy(update={"heads": 64})
    for keys, param in (
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"output_qk": True}, "output_qk"),
    ):
        with pytest.raises(SpecError) as caught:
            requested_spec(keys, compat, large)
        assert caught.value.param == param
    assert len(requested_spec({"steer": {"optimal_layer": "all"}}, compat, large).steer) == 300


def test_what_the_engine_does_not_read_is_refused_even_when_all_is_asked_for() -> None:
    for key in ("output_hidden_states", "output_qk"):
        with pytest.raises(SpecError, match="no tap") as caught:
            requested_spec({key: True}, COMPAT, EngineConfig())
        assert caught.value.param == key


def test_mias_whole_layers_are_not_made_of_some_heads() -> None:
    some = EngineConfig(attention_heads=((1, 0), (1, 2)))
    with pytest.raises(SpecError, match="whole layers") as caught:
        requested_spec({"output_qk": {"0": [2]}}, COMPAT, some)
    assert caught.value.param == "output_qk"


def test_an_engine_that_does_not_play_mias_part_refuses_mias_keys_and_takes_ours() -> None:
    with pytest.raises(SpecError, match="MIA_WORKER"):
        requested_spec({"steer": True}, None, TAPS)
    ours = MiaSpec.model_validate({"hidden": {"h": {"layer": 1}}})
    assert requested_spec({"mia": ours.to_wire(), "run_id": "anything/at all"}, None, TAPS) == ours


def test_files_have_the_operators_format_where_the_operator_has_a_folder() -> None:
    taps = TAPS.model_copy(update={"artifact_folder": Path("/srv/readouts")})
    pt = COMPAT.model_copy(update={"file_format": "pt"})
    asked = {"output_hidden_states": True, "save_to_disk": 1, "run_id": "run-1"}
    assert requested_spec(asked, COMPAT, taps).deliver == "safetensors"
    assert requested_spec(asked, pt, taps).deliver == "pt"


# Configs and the start


def test_every_section_that_mias_configs_have_is_read_and_the_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(
        json.dumps(
            {
                "model_info": {"provider": "attn-hf", "name": "x", "note": ""},
                "params": {"temperature": 0.1, "max_output_tokens": 32, "important_heads": [[10, 6], [11, 0], [11, 2]]},
                "hookq": {"hookq_mode": "last_token", "capture": "qk", "score_head": 0},
                "hidden_states": {"layers": [1, 2], "mode": "all_tokens"},
                "steering": {
                    "method": "add_vector",
                    "coefficient": 4,
                    "optimal_layer": [6, 10],
                    "vector_path": "v.pt",
                    "apply_at_all_positions": True,
                },
                "scihal": {"clf_path": "/somewhere.joblib"},
                "optimizations": {"steer_fused": False},
            }
        )
    )
    config = read_model_config(path)
    assert config.hidden_keys() == {"output_hidden_states": [1, 2], "hs_mode": "all_tokens"}
    assert config.qk_keys("all_tokens")["output_qk"] == {10: [6], 11: [0, 2]}
    assert config.qk_keys("all_tokens")["hookq_mode"] == "last_token"
    assert config.steering is not None
    assert config.steering.optimal_layer == (6, 10)


@pytest.mark.parametrize("layers", [{}, {"layers": []}])
def test_a_config_without_layers_means_all_of_them(layers: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"hidden_states": layers}))
    keys = read_model_config(tmp_path / "c.json").hidden_keys()
    assert keys == {"output_hidden_states": True, "hs_mode": "last_token"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"hidden_states": {"layer": [1]}}', "hidden_states.layer"),
        ('{"steering": {"optimal_layer": -1}}', "steering.optimal_layer"),
        ('{"params": {"important_heads": [[1]]}}', "params.important_heads"),
        ("[]", "c.json"),
        ("{", "c.json"),
    ],
)
def test_a_config_that_is_wrong_is_refused_with_file_and_field(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(CompatError, match=r"c\.json") as caught:
        read_model_config(tmp_path / "c.json")
    assert named in str(caught.value)


def test_a_config_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompatError, match=r"none\.json"):
        read_model_config(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("capture_hs", ("hidden_states",)),
        ("probe_hidden_states", ("hidden_states",)),
        ("hidden_states", ("hidden_states",)),
        ("capture_qk", ("qk",)),
        ("probe_hook_qk", ("qk",)),
        ("qk", ("qk",)),
        ("steer", ("steer",)),
        ("steer_hook_act", ("steer",)),
        ("capture_hs, capture_qk,steer", ("hidden_states", "qk", "steer")),
    ],
)
def test_workers_have_all_names_that_mia_gave_them_and_several_fit_on_an_engine(name: str, uses: Any) -> None:
    assert parse_uses(name, "worker_name") == uses


def test_mia_worker_decides_the_taps() -> None:
    compat = compat_from_environment({"MIA_WORKER": "hidden_states"})
    assert compat is not None
    taps = engine_config(compat, SHAPE)
    assert taps.hidden_layers == (1, 2, 3)
    assert (taps.attention_heads, taps.steering_layers) == ((), ())
    assert taps.max_hidden_rows_per_step == 2048
    qk = engine_config(CompatConfig(uses=("qk",)), SHAPE)
    assert qk.attention_heads == tuple((layer, head) for layer in (1, 2, 3) for head in range(HEADS))
    assert engine_config(CompatConfig(uses=("qk",), qk_layers=(0,)), SHAPE).attention_heads[-1] == (1, 3)
    assert TAPS.steering_layers == (1, 2, 3)
    assert TAPS.steering_vectors == ("tea", "plain")


def test_buffers_never_take_more_than_their_bytes_and_hold_a_row_for_each_request() -> None:
    compat = CompatConfig(uses=("hidden_states",), aperture_bytes=256 * LAYERS * 100)
    assert engine_config(compat, SHAPE).max_hidden_rows_per_step == 100
    assert engine_config(compat.model_copy(update={"aperture_bytes": 1}), SHAPE).max_hidden_rows_per_step == 64


def test_vllm_has_what_the_start_relies_on() -> None:
    assert isinstance(EngineArgs.__dict__["from_cli_args"], classmethod)
    assert hasattr(EngineArgs, "create_engine_config")
    assert {"additional_config", "model_config", "scheduler_config"} <= set(VllmConfig.__dataclass_fields__)
    assert {"max_num_batched_tokens", "max_num_seqs"} <= set(SchedulerConfig.__dataclass_fields__)
    sizes = {"total_num_hidden_layers", "total_num_attention_heads", "hidden_size"}
    assert sizes <= set(ModelArchitectureConfig.__dataclass_fields__)
    assert "model_arch_config" in inspect.getsource(VllmModelConfig)


def test_without_mia_worker_nothing_changes() -> None:
    assert compat_from_environment({}) is None
    assert compat_from_environment({"MIA_WORKER": "", "MIA_STEER_CONFIG": "/nowhere.json"}) is None


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"MIA_WORKER": "spotlight"}, "MIA_WORKER names 'spotlight'"),
        ({"MIA_WORKER": "steer"}, "needs MIA_STEER_CONFIG"),
        ({"MIA_WORKER": "steer", "MIA_STEER_CONFIG": "/nowhere.json"}, "nowhere.json"),
        ({"MIA_WORKER": "qk", "MIA_APERTURE_GPU_BYTES": "4G"}, "MIA_APERTURE_GPU_BYTES"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_with_the_setting(environment: dict[str, str], reason: str) -> None:
    with pytest.raises(CompatError, match=reason):
        compat_from_environment(environment)


def test_the_environment_of_a_steering_server_names_the_vector_that_requests_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("vectors").mkdir()
    torch.save({"dir": torch.tensor([0.6, 0.8]), "avg_proj": 2.0}, "vectors/tea.pt")
    Path("c.json").write_text(json.dumps({"steering": {"vector_path": "vectors/tea.pt", "optimal_layer": 1}}))
    environment = {"MIA_WORKER": "steer", "MIA_STEER_CONFIG": "c.json", "MIA_APERTURE_DIR": "captures"}
    compat = compat_from_environment({**environment, "MIA_USE_SAFETENSORS": "0"})
    assert compat is not None
    assert compat.artifact_folder == tmp_path / "captures"
    assert compat.file_format == "pt"
    assert CompatConfig.model_validate(compat.model_dump(mode="json", exclude_defaults=True)) == compat
    taps = engine_config(compat, SHAPE)
    for path in ("vectors/tea.pt", "tea.pt", "tea"):
        (steer,) = requested_spec({"steer": json.dumps({"vector_path": path})}, compat, taps).steer
        assert (steer.vector, steer.target, steer.layer) == ("tea", 2.0, 2)


def test_wrong_arguments_of_the_constructor_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    for arguments, reason in (
        ({}, "engine_config or worker_name"),
        ({"worker_name": "capture_hs", "engine_config": EngineConfig()}, "engine_config or worker_name"),
        ({"worker_name": "no-such"}, "worker_name names"),
        ({"worker_name": "steer"}, "needs a config_file"),
        ({"worker_name": "steer", "config_file": tmp_path / "c.json"}, "vector_path"),
        ({"worker_name": "capture_hs", "analyzer_name": "no-such"}, "attn_tracker, hidden_states"),
    ):
        with pytest.raises(CompatError, match=reason):
            MiaLLM("no-such-model", **arguments)  # type: ignore[arg-type]


# Vectors


UNIT = np.array([0.6, 0.0, 0.8], np.float32)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    "contents",
    [
        {"dir": UNIT, "avg_proj": np.float32(-1.5)},
        {"dir": UNIT.astype(np.float64), "avg_proj": np.array(-1.5)},
        {"dir": torch.from_numpy(UNIT), "avg_proj": torch.tensor(-1.5)},
        {"dir": torch.from_numpy(UNIT)[None], "avg_proj": -1.5},
    ],
)
def test_a_vector_file_of_mias_becomes_the_banks_in_a_folder_for_its_owner_alone(contents: Any, cache: Path) -> None:
    torch.save(contents, cache / "tea v1.pt")
    name, folder, avg_proj = convert_vector(cache / "tea v1.pt")
    assert (name, avg_proj) == ("tea_v1", -1.5)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "tea_v1.safetensors").stat().st_mode) == 0o600
    np.testing.assert_allclose(load_file(folder / "tea_v1.safetensors")["vector"].numpy(), UNIT)
    assert convert_vector(cache / "tea v1.pt") == (name, folder, avg_proj)


def test_a_safetensors_file_works_as_well(cache: Path) -> None:
    save_file({"dir": torch.from_numpy(UNIT), "avg_proj": torch.tensor(0.5)}, cache / "v.safetensors")
    assert convert_vector(cache / "v.safetensors")[2] == 0.5


def test_a_direction_that_is_not_of_length_one_can_be_added_and_not_projected_on(cache: Path) -> None:
    torch.save({"dir": UNIT * 3, "avg_proj": 1.0}, cache / "long.pt")
    name, folder, avg_proj = convert_vector(cache / "long.pt")
    assert avg_proj is None
    np.testing.assert_allclose(load_file(folder / f"{name}.safetensors")["vector"].numpy(), UNIT * 3)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(os.environ["XDG_CACHE_HOME"]) / "pwned"),)


@pytest.mark.parametrize("contents", [Evil(), {"dir": Evil()}, {"dir": np.array([Evil()], dtype=object)}])
def test_a_pickle_of_anything_else_is_not_unpickled_and_the_remedy_is_told(contents: Any, cache: Path) -> None:
    (cache / "cache").mkdir()
    torch.save(contents, cache / "evil.pt")
    with pytest.raises(CompatError, match=r"evil\.pt.*torch\.save"):
        convert_vector(cache / "evil.pt")
    assert list((cache / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({"direction": UNIT}, "no tensor 'dir'"),
        ({"dir": np.zeros(3, np.float32)}, "zero"),
        ({"dir": np.array([np.nan], np.float32)}, "not finite"),
        ({"dir": UNIT, "avg_proj": float("inf")}, "avg_proj"),
        ([1, 2], "not a dict"),
    ],
)
def test_a_file_without_a_usable_vector_is_refused(contents: Any, reason: str, cache: Path) -> None:
    torch.save(contents, cache / "v.pt")
    with pytest.raises(CompatError, match=reason):
        convert_vector(cache / "v.pt")


def test_a_file_that_is_no_vector_file_or_is_not_there_is_refused(cache: Path) -> None:
    (cache / "junk.pt").write_bytes(b"hello")
    for name in ("junk.pt", "none.pt", "none.safetensors"):
        with pytest.raises(CompatError, match=name):
            convert_vector(cache / name)


# Probes and analyzers


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_probes_have_one_entry_for_each_choice_of_each_prompt_in_order() -> None:
    def one(prompt: int, choice: int) -> Readouts:
        item = HiddenReadout("complete", 2, 4, 9, row(prompt, choice))
        return Readouts({"hs.2.last_prompt": item}, prompt_tokens=5, prompt_index=prompt, choice_index=choice)

    probes = probes_of([one(1, 0), one(0, 1), one(0, 0), one(1, 1)])
    entry = probes["hs_cache"][2]
    assert [tensor.tolist() for tensor in entry["hidden_states"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert (entry["layer_num"], entry["positions"]) == (2, [(4,)] * 4)
    assert "qk_cache" not in probes


def test_rows_are_those_of_the_prompt_and_then_the_generated_ones() -> None:
    prompt = Readouts({"a": HiddenReadout("complete", 1, 2, 7, row(2, 2))}, prompt_tokens=3)
    final = Readouts({"b": RowsReadout("complete", 1, (3, 4), (8, 9), np.stack([row(3, 3), row(4, 4)]))}, stage="final")
    entry = probes_of([final, prompt])["hs_cache"][1]
    assert entry["positions"] == [(2, 3, 4)]
    assert entry["hidden_states"][0].tolist() == [[2, 2], [3, 3], [4, 4]]
    nothing = Readouts({"b": RowsReadout("complete", 1)}, stage="final")
    assert probes_of([prompt, nothing])["hs_cache"][1]["hidden_states"][0].tolist() == [[2, 2]]


def test_a_value_that_is_missing_is_none_with_its_reason_and_the_analyzer_says_so() -> None:
    full = Readouts({"a": HiddenReadout("complete", 1, 2, 7, row(1))})
    lost = Readouts({"a": HiddenReadout("dropped", 1, reason="no space")}, prompt_index=1)
    other = Readouts({"b": HiddenReadout("complete", 2, 2, 7, row(1))}, prompt_index=2)
    probes = probes_of([full, lost, other])
    assert probes["hs_cache"][1]["hidden_states"][1:] == [None, None]
    with pytest.raises(MissingReadoutError, match=r"layer 1, request 1.*dropped: no space"):
        HiddenStatesAnalyzer().analyze({"reduce": "none"}, probes=probes)
    with pytest.raises(MissingReadoutError, match=r"layer 2, request 0.*did not ask"):
        HiddenStatesAnalyzer().analyze(probes={"hs_cache": {2: probes["hs_cache"][2]}})


def test_hidden_states_are_reduced_as_asked() -> None:
    rows = RowsReadout("complete", 1, (0, 1), (5, 6), np.stack([row(3, 0), row(5, 4)]))
    probes = probes_of([Readouts({"h": rows, "v": HiddenReadout("complete", 2, 1, 6, row(3, 4))})])
    analyze = HiddenStatesAnalyzer().analyze
    (vectors,) = analyze({"reduce": "none"}, probes=probes)["hidden_states"][1]
    assert vectors.tolist() == [[3, 0], [5, 4]]
    means = analyze({"reduce": "mean"}, probes=probes)["hidden_states"]
    assert (means[1][0].tolist(), means[2][0].tolist()) == ([4, 2], [3, 4])
    norms = analyze({"reduce": "norm"}, probes=probes)["hidden_states"]
    assert norms == {1: [pytest.approx(50**0.5)], 2: [pytest.approx(5.0)]}
    with pytest.raises(ValueError, match="reduce is one of"):
        analyze({"reduce": "max"}, probes=probes)


TOKENS, SIZE = 9, 4


def qk_readouts(positions: tuple[int, ...], kind: str, tokens: int = TOKENS, prompt: int = 0) -> Readouts:
    """Four query heads and two key heads in layers 1 and 3, the latter with a soft cap and a sliding window."""
    generator = np.random.default_rng(prompt)
    queries = {n: generator.standard_normal((TOKENS + 2, 4, SIZE)).astype(np.float32) for n in (1, 3)}
    keys = {n: generator.standard_normal((TOKENS + 2, 2, SIZE)).astype(np.float32) for n in (1, 3)}
    item = QKReadout(
        "complete",
        tuple((n, head) for n in (1, 3) for head in range(4)),
        positions,
        positions,
        {n: queries[n][list(positions)] for n in queries},
        {n: keys[n][:tokens] for n in keys},
        kv_heads={1: (0, 1), 3: (0, 1)},
        group={1: 2, 3: 2},
        scale={1: 0.3, 3: 0.7},
        softcap={1: 0.0, 3: 0.5},
        window={1: None, 3: 7},
    )
    return Readouts({f"qk.{kind}": item}, prompt_tokens=TOKENS, prompt_index=prompt)


def expected_score(readouts: Readouts, heads: dict[int, tuple[int, ...]], ranges: Any, attn_func: str) -> float:
    """The formula, token by token."""
    (item,) = readouts.items.values()
    assert isinstance(item, QKReadout)
    scores = []
    for layer0, numbers in heads.items():
        layer = layer0 + 1
        query = item.queries[layer][item.positions.index(TOKENS - 1)]
        for head in numbers:
            logits = np.array([query[head] @ item.keys[layer][t, head // 2] for t in range(TOKENS)]) * item.scale[layer]
            if cap := item.softcap[layer]:
                logits = cap * np.tanh(logits / cap)
            if window := item.window[layer]:
                logits[: TOKENS - window] = -np.inf
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            instruction, data = (weights[start:end] for start, end in ranges)
            score = instruction.sum() if "sum" in attn_func else instruction.max()
            if "normalize" in attn_func:
                score /= instruction.sum() + data.sum() + 1e-8
            scores.append(score)
    return float(np.mean(scores))


@pytest.mark.parametrize("attn_func", ["sum", "max", "sum_normalize", "max_normalize"])
@pytest.mark.parametrize("heads", [{0: (1,), 2: (0, 3)}, {}])
@pytest.mark.parametrize(
    ("positions", "kind", "tokens"),
    [
        ((TOKENS - 1,), "last_prompt", TOKENS),
        (tuple(range(TOKENS)), "prompt", TOKENS),
        (tuple(range(TOKENS + 2)), "all", TOKENS + 2),
    ],
)
def test_attention_on_the_instruction_is_what_the_formula_says(
    attn_func: str, heads: dict[int, tuple[int, ...]], positions: tuple[int, ...], kind: str, tokens: int
) -> None:
    ranges = ((1, 4), (-4, -1))
    readouts = [qk_readouts(positions, kind, tokens, prompt) for prompt in (0, 1)]
    analyzer = AttentionTrackerAnalyzer(None, heads)
    counted = heads or {0: (0, 1, 2, 3), 2: (0, 1, 2, 3)}
    expected = [expected_score(one, counted, ranges, attn_func) for one in readouts]
    for input_range in (ranges, [ranges, ranges], [[[1, 4], [-4, -1]]] * 2):
        spec = {"input_range": input_range, "attn_func": attn_func}
        assert analyzer.analyze(spec, probes=probes_of(readouts))["score"] == pytest.approx(expected, rel=1e-5)


def test_queries_and_keys_have_mias_layout() -> None:
    cache = probes_of([qk_readouts((TOKENS - 1,), "last_prompt")])["qk_cache"]
    assert list(cache) == [0, 2]
    assert cache[2]["q"][0].shape == (4 * SIZE,)
    assert cache[2]["k_all"][0].shape == (TOKENS, 2 * SIZE)
    assert (cache[2]["heads"], cache[2]["kv_heads"], cache[2]["scale"]) == ((0, 1, 2, 3), (0, 1), 0.7)
    rows = probes_of([qk_readouts(tuple(range(TOKENS)), "prompt")])["qk_cache"][0]["q"][0]
    assert rows.shape == (TOKENS, 4 * SIZE)


def test_scores_are_as_good_as_queries_and_keys() -> None:
    weights = np.array([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]], np.float32)
    item = AttentionReadout("complete", ((1, 2), (1, 0)), (2,), (7,), {}, weights)
    probes = probes_of([Readouts({"score.last_prompt": item}, prompt_tokens=3)])
    assert probes["qk_cache"][0]["score"][0].shape == (2, 1, 3)
    analyzer = AttentionTrackerAnalyzer(None, {0: [0]})
    spec = {"input_range": ((0, 1), (1, 2)), "attn_func": "sum_normalize"}
    assert analyzer.analyze(spec, probes=probes)["score"] == [pytest.approx(0.1 / 0.9)]


def test_what_the_attention_tracker_cannot_score_is_an_error_with_the_reason() -> None:
    probes = probes_of([qk_readouts((TOKENS - 1,), "last_prompt")])
    ranges = ((1, 4), (-4, -1))

    def analyze(heads: Any = None, probes: Probes = probes, **spec: Any) -> Any:
        return AttentionTrackerAnalyzer(None, heads).analyze({"input_range": ranges, **spec}, probes=probes)

    for call, reason in (
        (lambda: analyze(attn_func="mean"), "attn_func"),
        (lambda: analyze(input_range=[ranges, ranges]), "input_range"),
        (lambda: analyze(input_range=(1, 4)), "input_range"),
        (lambda: analyze(input_range=((4, 4), (5, 6))), "no tokens"),
        (lambda: analyze(heads={1: [0]}), "layers \\[1\\]"),
        (lambda: analyze(heads={0: [9]}), "heads \\[9\\]"),
        (lambda: analyze(probes={}), "output_qk"),
        (lambda: analyze(probes=probes_of([qk_readouts((0, 1), "prompt")])), "last prompt token"),
    ):
        with pytest.raises(ValueError, match=reason):
            call()


def test_some_heads_of_a_layer_find_their_key_heads() -> None:
    whole = qk_readouts((TOKENS - 1,), "last_prompt")
    (item,) = whole.items.values()
    assert isinstance(item, QKReadout)
    some = replace(
        item,
        heads=((1, 3), (1, 2)),
        queries={1: item.queries[1][:, [3, 2]]},
        keys={1: item.keys[1][:, [1]]},
        kv_heads={1: (1,)},
    )
    probes = probes_of([Readouts({"mine": some}, prompt_tokens=TOKENS)])
    ranges = ((1, 4), (-4, -1))
    score = AttentionTrackerAnalyzer().analyze({"input_range": ranges}, probes=probes)["score"][0]
    assert score == pytest.approx(expected_score(whole, {0: (2, 3)}, ranges, "sum_normalize"), rel=1e-5)


def test_saved_runs_are_read_back_by_their_name(tmp_path: Path) -> None:
    readouts = [qk_readouts((TOKENS - 1,), "last_prompt"), Readouts({"h": HiddenReadout("complete", 1, 0, 0, row(1))})]
    readouts[1] = Readouts({"h": HiddenReadout("complete", 1, 0, 0, row(1, 2))}, prompt_index=1)
    (tmp_path / "run-1").mkdir()
    for name, content in encode(readouts, "safetensors").items():
        (tmp_path / "run-1" / name).write_bytes(content)
    saved = load_probes(tmp_path, "run-1")
    assert saved["hs_cache"][1]["hidden_states"][1].tolist() == [1, 2]
    assert torch.equal(saved["qk_cache"][0]["q"][0], probes_of(readouts)["qk_cache"][0]["q"][0])
    with pytest.raises(MissingReadoutError, match="save_to_disk"):
        load_probes(tmp_path, "run-2")


def test_a_registered_analyzer_is_found_by_its_name_and_an_unknown_name_is_told_what_there_is() -> None:
    class Mine:
        def __init__(self, hook_dir: Any, layer_to_heads: Any) -> None: ...

    PluginRegistry.register_analyzer("mine", Mine)
    assert PluginRegistry.get("mine") is Mine
    assert PluginRegistry.get("hidden_states") is HiddenStatesAnalyzer
    assert PluginRegistry.get("attn_tracker") is AttentionTrackerAnalyzer
    with pytest.raises(CompatError, match="attn_tracker, hidden_states, mine"):
        PluginRegistry.get("no-such")


def test_a_client_that_has_no_answer_yet_says_so_and_one_that_has_another_names_the_run() -> None:
    client = MiaClient("http://127.0.0.1:9/v1", analyzer_name="hidden_states")
    with pytest.raises(CompatError, match="nothing to analyze: pass probes, or generate first"):
        client.analyze({"reduce": "norm"})
    client.run_id, client.probes = "run-1", {}
    with pytest.raises(CompatError, match="run 'run-2' is not the last one"):
        client.analyze({"reduce": "norm"}, run_id="run-2")


def test_the_package_gives_its_three_names_without_loading_torch_vllm_or_openai() -> None:
    code = (
        "import sys; from guard.mia import MiaClient, MiaLLM, PluginRegistry; import guard.mia\n"
        "print(sorted(guard.mia.__all__), {'torch', 'vllm', 'openai', 'transformers'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split("\n")[0] == "['MiaClient', 'MiaLLM', 'PluginRegistry'] set()"
