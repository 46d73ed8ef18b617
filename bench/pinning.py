"""Main threads that stay where they are: of each engine's process and of the process of its core.

All engines of a run get the same processors, since one works at a time. Without it, the same run of the same engine
takes half as long again for some seconds and then not, as the scheduler moves them: more than all that is compared.
"""

from __future__ import annotations

import os

import psutil
import torch

ENGINE_CORE, FRONT_END = 2, 4
LEAST_PROCESSORS = 8


def pin_main_threads() -> dict[str, int]:
    """This process's and its engine core's: which processor each got. Nothing without a GPU or with few processors.

    Threads that run already keep all processors.
    """
    if not torch.cuda.is_available() or (os.cpu_count() or 0) < LEAST_PROCESSORS:
        return {}
    cores = [one for one in psutil.Process().children(recursive=True) if "EngineCore" in one.name()]
    for core in cores:
        os.sched_setaffinity(core.pid, {ENGINE_CORE})
    os.sched_setaffinity(0, {FRONT_END})
    return {"front_end": FRONT_END} | ({"engine_core": ENGINE_CORE} if cores else {})
