"""A calibration that is terminated, as by a system that runs out of patience, ends what it has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import pathlib, sys, time
from contextlib import contextmanager
from detectors.calibration.cli import told_errors

@contextmanager
def engine():
    try:
        yield
    finally:
        pathlib.Path(sys.argv[1]).write_text("ended")

with told_errors(), engine():
    print("started", flush=True)
    time.sleep(300)
"""


def test_what_was_started_is_ended_on_sigterm(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "said")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.terminate()
    assert process.wait(60) == 143
    assert (tmp_path / "said").read_text() == "ended"
