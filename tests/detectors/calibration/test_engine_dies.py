"""An engine that dies while rows are read, as when the machine has no memory left: told in one line, and nothing that
was read is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from tests.detectors.calibration.tiny_model import write_rows
from tests.engine import oracle


def kept(cache: Path) -> list[Path]:
    return [path for path in (cache / "mia-guard" / "features").rglob("*") if path.is_file()]


def test_an_engine_that_dies_is_told_in_one_line_and_the_next_run_goes_on(tmp_path: Path) -> None:
    model, cache = oracle.save("llama", tmp_path / "tiny"), tmp_path / "cache"
    data = write_rows(tmp_path / "mine.jsonl", 600)
    command = [sys.executable, "-m", "guard", "calibrate", "probe", "--model", str(model), "--data", str(data)]
    command += ["--rows", "0", "--out", str(tmp_path / "configs")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        done = threading.Event()

        def kill_when_something_was_read() -> None:
            while not kept(cache) and not done.wait(0.01):
                pass
            for child in psutil.Process(run.pid).children(recursive=True):
                # The one that holds most, and so the one that a system without memory kills.
                if "Worker" in child.name():
                    child.kill()

        watching = threading.Thread(target=kill_when_something_was_read)
        watching.start()
        assert run.stdout is not None
        told = run.stdout.read()
        done.set()
        watching.join()
    assert run.returncode == 1, told[-2000:]
    # Python's own helper processes may say something after it.
    (line,) = (line for line in told.splitlines() if line.startswith("guard: "))
    assert line.startswith("guard: the engine died"), told[-2000:]
    assert "goes on from there" in line
    assert "Traceback" not in told.partition(line)[2]
    assert kept(cache)
