"""Servers as processes of their own: waiting until one answers, and ending it with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

START_LIMIT_S = 300
STOP_LIMIT_S = 40


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - a loopback address
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.3)
    pytest.fail(f"the server was not ready after {START_LIMIT_S} s:\n{log.read_text()[-4000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """First as Ctrl-C does, which stops the engine too, then by force. The process leads a session of its own."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
