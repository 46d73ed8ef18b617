"""Restarting an engine, shown with a small real server in place of vLLM."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from guard.engine_process import EngineCommand, EngineError, EngineProcess, explain_end, previous_log
from guard.machine import free_port
from guard.supervisor import LONGEST_DELAY_S, backoff, running_engine
from tests.processes import process_runs

HEALTHY_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(tmp_path: Path, program: str) -> EngineCommand:
    port = free_port()
    log_file = tmp_path / "engine.log"
    return EngineCommand((sys.executable, "-c", program, str(port)), {}, f"http://127.0.0.1:{port}", log_file)


def silent() -> Callable[[float], None]:
    return lambda _: None


async def wait_for(said: list[str], text: str) -> None:
    async with asyncio.timeout(30):
        while not any(text in line for line in said):
            await asyncio.sleep(0.05)


async def test_a_killed_engine_is_explained_and_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    async with running_engine(command(tmp_path, HEALTHY_SERVER), said.append, silent) as engine:
        first = engine.process.process_id
        os.kill(first, signal.SIGKILL)
        await wait_for(said, "the engine is back")
        assert engine.process.process_id != first
        assert engine.process.alive
        last = engine.process
    assert "was killed by SIGKILL" in said[0]
    assert not last.alive


async def test_every_start_tells_how_long_it_takes_from_its_own_beginning(tmp_path: Path) -> None:
    said: list[str] = []
    starts: list[list[float]] = []

    def ticks() -> Callable[[float], None]:
        starts.append([])
        return starts[-1].append

    slow = "import time; time.sleep(1.2)\n" + HEALTHY_SERVER
    async with running_engine(command(tmp_path, slow), said.append, ticks) as engine:
        os.kill(engine.process.process_id, signal.SIGKILL)
        await wait_for(said, "the engine is back")
    assert len(starts) == 2
    for elapsed_s in starts:
        assert len(elapsed_s) >= 2
        assert elapsed_s[0] < 1.2
        assert elapsed_s == sorted(elapsed_s)


async def test_an_engine_that_cannot_start_raises_its_own_error(tmp_path: Path) -> None:
    broken = command(tmp_path, "raise OSError('Address already in use')")
    with pytest.raises(EngineError, match="--engine-port"):
        async with running_engine(broken, print, silent):
            pytest.fail("there is no engine to serve with")


async def test_waiting_for_an_engine_that_never_answers_ends_and_leaves_no_process(tmp_path: Path) -> None:
    process = EngineProcess(command(tmp_path, "import time; time.sleep(600)"))
    ticks: list[float] = []
    with pytest.raises(EngineError, match="did not answer within 1 s"):
        await process.wait_healthy(1, ticks.append)
    assert ticks
    await process.stop()
    assert not process.alive


async def test_stopping_ends_children_that_ignore_the_polite_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guard.engine_process.STOP_PATIENCE_S", 0.5)
    program = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    process = EngineProcess(command(tmp_path, program))
    async with asyncio.timeout(10):
        while not (text := process.command.log_file.read_text()):
            await asyncio.sleep(0.05)
    await process.stop()
    assert not process.alive
    async with asyncio.timeout(5):
        while process_runs(int(text)):
            await asyncio.sleep(0.05)


def test_delays_double_up_to_a_limit() -> None:
    delays_s = list(itertools.islice(backoff(), 9))
    assert delays_s[:4] == [1, 2, 4, 8]
    assert delays_s[-1] == LONGEST_DELAY_S


def test_an_end_without_an_error_shows_the_last_lines() -> None:
    text = explain_end(3, "one\n\ntwo\n", Path("/logs/engine.log"))
    assert text.splitlines() == ["the engine ended with exit code 3", "one", "two", "its whole log: /logs/engine.log"]


async def test_children_of_an_engine_that_was_killed_are_ended_at_once(tmp_path: Path) -> None:
    parent = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    process = EngineProcess(command(tmp_path, parent))
    async with asyncio.timeout(10):
        while not (text := process.command.log_file.read_text()).endswith("\n"):
            await asyncio.sleep(0.05)
    os.kill(process.process_id, signal.SIGKILL)
    await process.wait_ended()
    began_s = time.monotonic()
    await process.stop()
    assert time.monotonic() - began_s < 8
    async with asyncio.timeout(5):
        while process_runs(int(text)):
            await asyncio.sleep(0.05)


async def test_the_log_of_an_engine_that_died_outlives_its_successors_start(tmp_path: Path) -> None:
    start = command(tmp_path, "print('last words')")
    first = EngineProcess(start)
    await first.wait_ended()
    second = EngineProcess(start)
    await second.wait_ended()
    assert previous_log(start.log_file).read_text() == "last words\n"
