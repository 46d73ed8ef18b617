"""Makes .venv from nothing: the virtual environment, vLLM for this machine (CUDA or CPU), and this checkout in it.

Needs only the standard library of Python 3.11 and a package index. A second run with nothing changed ends at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from platform import python_version

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "mia-guard-installed"
PYTHON = VENV / "bin" / "python"

OLDEST_PYTHON = (3, 11)
OLDEST_PIP = 24

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The CPU build of vLLM wants ``torch==X+cpu``, which on the open internet only this index has."""
PROBE_TIMEOUT_S = 3
REPORT_INTERVAL_S = 5

TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""The CPU build of vLLM pulls these in, built for another torch: importing torchvision fails with "operator
torchvision::nms does not exist" and takes transformers and vLLM's server down with it. Neither needs them for text."""


def main() -> None:
    started_s = time.monotonic()
    check_python()
    extra = "cuda" if has_gpu() else "cpu"
    stamp = fingerprint(extra)
    if STAMP.is_file() and STAMP.read_text() == stamp:
        return
    say(
        f"Python {sys.version.split()[0]}, {'an NVIDIA GPU' if extra == 'cuda' else 'no NVIDIA GPU: CPU build of vLLM'}"
    )
    if not PYTHON.exists():
        say(f"creating {VENV.name}")
        run(sys.executable, "-m", "venv", str(VENV))
    upgrade_pip()
    say("installing vLLM and the guard (about 1 GB for CPU, 8 GB for CUDA; the first time takes minutes)")
    install(f"{ROOT}[{extra},calibrate,dev]", *index_arguments(extra))
    if extra == "cpu":
        say(f"removing {', '.join(TORCH_COMPANIONS)}: they do not work beside the CPU build")
        pip("uninstall", "--yes", "--quiet", *TORCH_COMPANIONS)
    STAMP.write_text(stamp)
    say(f"ready after {time.monotonic() - started_s:.0f} s")


def check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        stop(f"Python {wanted} or newer is needed, this is {python_version()}. Then: make PYTHON=/path/to/it")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        stop(f"this Python has no venv module. On Debian and Ubuntu: sudo apt install python{minor}-venv")


def has_gpu() -> bool:
    """An NVIDIA driver that answers and lists at least one GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def fingerprint(extra: str) -> str:
    """Changes when another install could give another result."""
    digest = hashlib.sha256()
    for file in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    return f"{extra} {sys.version_info.major}.{sys.version_info.minor} {digest.hexdigest()}\n"


def upgrade_pip() -> None:
    version = subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    words = version.stdout.split()
    if len(words) < 2 or int(words[1].split(".")[0]) < OLDEST_PIP:
        say("upgrading pip")
        pip("install", "--quiet", "--upgrade", f"pip>={OLDEST_PIP}")


def index_arguments(extra: str) -> list[str]:
    """PyTorch's CPU index where it answers. Unreachable, it would cost pip minutes of retries for every package."""
    if extra != "cpu":
        return []
    probe = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=3)"
    try:
        # A process of its own, because a timeout of urlopen does not cover name resolution.
        command = [sys.executable, "-c", probe, f"{TORCH_CPU_INDEX}/torch/"]
        subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=True)
    except subprocess.SubprocessError:
        say(f"{TORCH_CPU_INDEX} does not answer: using pip's own index alone")
        return []
    return ["--extra-index-url", TORCH_CPU_INDEX]


def install(what: str, *arguments: str) -> None:
    """pip's hundreds of lines become one every few seconds, and all of them when it fails."""
    command = [str(PYTHON), "-u", "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
    command += [*arguments, "--editable", what]
    lines = ["starting"]
    started_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=lines.extend, args=(process.stdout,))
        reader.start()
        told = ""
        while reader.is_alive():
            reader.join(REPORT_INTERVAL_S)
            # pip writes gigabytes to disk without a word, after its last line about what it removed.
            newest = lines[-1].strip()[:100]
            shown = newest if newest != told and "uninstalled" not in newest else "writing packages to disk"
            say(f"{time.monotonic() - started_s:4.0f} s: {shown}")
            told = newest
    if process.returncode != 0:
        stop("".join([*lines, f"\npip failed with exit code {process.returncode}. Repair that and run make again."]))


def pip(*arguments: str) -> None:
    run(str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments)


def run(*command: str) -> None:
    code = subprocess.run(command, check=False, env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "0"}).returncode
    if code != 0:
        stop(f"failed (exit {code}): {' '.join(command)}\nFix what is said above and run make again; it continues.")


def say(text: str) -> None:
    print(f"[install] {text}", flush=True)


def stop(text: str) -> None:
    print(f"[install] {text}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
