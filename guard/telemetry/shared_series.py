"""The files that the worker processes of one proxy count in, as prometheus-client writes them: read as one, and those
of processes that have ended added up in one, so that a read takes no longer for each worker that ever died.

Owns the lock between the two: who reads finds a process' counts either in its own files or in the sum. Counters and
histograms are added; of a gauge that goes by its latest value that one stays; ``live`` gauges go with their process.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from guard.telemetry.locking import locked

log = logging.getLogger("guard.metrics")

LOCK = "series.lock"
LOCK_WAIT_S = 10.0
"""Either side takes milliseconds."""

ADDED = ("counter", "histogram")
LATEST = ("gauge_mostrecent",)
SUM = "ended"
"""Stands where a file's name has its process."""


def exposition_of(folder: Path) -> bytes:
    """All that processes have counted in this folder. Raises ``OSError``."""
    with _locked(folder, "shared"):
        merged = CollectorRegistry()
        MultiProcessCollector(merged, str(folder))  # type: ignore[no-untyped-call]
        return generate_latest(merged)


def fold(folder: Path, ended: Collection[int]) -> None:
    """Add up what these processes have counted. They must have ended, and no other of the same id be counting there.

    Raises ``OSError``; then everything is as it was, and counts.
    """
    with _locked(folder, "exclusive"):
        for process_id in ended:
            mark_process_dead(process_id, str(folder))  # type: ignore[no-untyped-call]
        for kind in (*ADDED, *LATEST):
            files = [file for one in ended if (file := folder / f"{kind}_{one}.db").exists()]
            if files:
                _fold(folder / f"{kind}_{SUM}.db", files, latest=kind in LATEST)


def _fold(sum_: Path, files: list[Path], *, latest: bool) -> None:
    found: dict[str, tuple[float, float]] = {}
    for file in (sum_, *files):
        for key, value, time_s in _values(file):
            before, before_s = found.get(key, (0.0, 0.0))
            if not latest:
                found[key] = (before + value, 0.0)
            elif key not in found or time_s >= before_s:
                found[key] = (value, time_s)
    new = sum_.with_suffix(".new")
    try:
        _write(new, found)
        new.replace(sum_)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    for file in files:
        file.unlink()


def _values(file: Path) -> list[tuple[str, float, float]]:
    """Key, value, and when a gauge was set; none where there is no file."""
    if not file.exists():
        return []
    try:
        values = MmapedDict.read_all_values_from_file(str(file))  # type: ignore[no-untyped-call]
        return [(key, value, time_s) for key, value, time_s, _ in values]
    except (struct.error, RuntimeError, UnicodeDecodeError) as error:
        # Its process was killed while it made the file.
        log.error("what a worker has counted in %s is lost: %s", file.name, type(error).__name__)
        return []


def _write(file: Path, values: dict[str, tuple[float, float]]) -> None:
    file.unlink(missing_ok=True)
    written = MmapedDict(str(file))  # type: ignore[no-untyped-call]
    try:
        for key, (value, time_s) in values.items():
            written.write_value(key, value, time_s)  # type: ignore[no-untyped-call]
    finally:
        written.close()  # type: ignore[no-untyped-call]


@contextmanager
def _locked(folder: Path, kind: Literal["shared", "exclusive"]) -> Iterator[None]:
    path = folder / LOCK
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with locked(file, path, LOCK_WAIT_S, kind):
            yield
    finally:
        os.close(file)
