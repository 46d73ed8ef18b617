from __future__ import annotations

import subprocess
import sys
import time

import psutil

from tests.processes import runs, started_by


def test_a_child_that_ended_and_was_not_waited_for_is_none_and_hides_no_other() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "pass"]) as first,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as second,
    ):
        try:
            ended, running = psutil.Process(first.pid), psutil.Process(second.pid)
            while ended.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            assert started_by(None, "time.sleep(600)", recursive=True) == [running]
            assert started_by(None, "no such word") == []
            assert (runs(ended), runs(running)) == (False, True)
            first.wait()
            assert not runs(ended)
        finally:
            second.kill()
