"""How long a large ledger takes to write, search and check: ``python -m bench.ledger_reading [ENTRIES]``.

Owns the made-up entries and the list of what is timed. Reads go through what ``guard ledger`` uses.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench.about import commit
from detectors.base import Score
from guard.telemetry.ledger_check import check
from guard.telemetry.ledger_file import LedgerFile
from guard.telemetry.ledger_query import Query, matching
from guard.telemetry.ledger_reader import entries, find, recent
from guard.telemetry.ledger_stats import stats
from guard.telemetry.record import RequestRecord

BATCH = 500
MEASURED = {"injection": "probe@0123456789ab", "focus": "attention_tracker@0123456789ab"}


def write(path: Path, count: int) -> float:
    """Made-up requests, half a second apart; seconds of CPU in the ledger's own code."""
    file, took_s, start = LedgerFile(path), 0.0, datetime(2026, 11, 1, tzinfo=UTC)
    for first in range(0, count, BATCH):
        lines = [_line(number, start + timedelta(seconds=number / 2)) for number in range(first, first + BATCH)]
        began_s = time.process_time()
        whole, error = file.append(lines)
        took_s += time.process_time() - began_s
        if whole != BATCH:
            raise OSError(f"the ledger could not be written: {error}")
    file.close()
    return took_s


def _line(number: int, came: datetime) -> bytes:
    record = RequestRecord("/v1/chat/completions", "default", "0" * 64, f"{number:032x}", started_at=came)
    record.model, record.key, record.tenant = "smollm2-135m", f"k{number % 7}", f"t{number % 5}"
    record.scores = {"injection": Score("scored", number % 200 / 200), "focus": Score("scored", 0.5)}
    record.measured, record.outcome, record.status, record.total_s = MEASURED, "completed", 200, 0.0321
    entry = record.to_entry() | {"action": "block" if number % 50 == 0 else "allow"}
    return json.dumps(entry, separators=(",", ":")).encode()


def _last(found: Iterable[object]) -> object:
    return next(iter(deque(found, maxlen=1)), None)


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        load = os.getloadavg()[0]
        print(f"commit {commit()}, python {platform.python_version()}, {os.cpu_count()} CPUs, load before {load:.1f}")
        took_s = write(path, count)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        each_us = took_s / count * 1e6
        print(f"{count} entries, {size} bytes; append: {each_us:.1f} us of CPU an entry, in batches of {BATCH}")
        timed: dict[str, Callable[[], object]] = {
            "recent 100": lambda: recent(path, 100),
            "find the oldest request": lambda: find(path, f"{0:032x}"),
            "find a request that is not there": lambda: find(path, "nope"),
            "query --action block, the first 100": lambda: list(
                zip(range(100), matching(path, Query({"action": "block"})), strict=False)
            ),
            "query --action block, all": lambda: _last(matching(path, Query({"action": "block"}))),
            "query --tenant of nobody": lambda: _last(matching(path, Query({"tenant": "nobody"}))),
            "query --score of nobody, which parses all": lambda: _last(
                matching(path, Query(scores={"injection": 2.0}))
            ),
            "stats": lambda: stats(entries(path)),
            "verify": lambda: check(path),
        }
        for name, work in timed.items():
            began_s, cpu_s = time.perf_counter(), time.process_time()
            work()
            took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
            print(f"{name}: {cpu_s:.2f} s of CPU, {took_s:.2f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
