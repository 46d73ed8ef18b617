"""What a ledger has in it, counted: requests by policy, assignment, action, outcome and rule, scores, tokens, times.

Owns the sums, and the words of them and of an entry as one line for people.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from guard.telemetry.ledger_reader import Entry, chained

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
COUNTED = ("policy", "assignment", "action", "outcome", "route", "model", "tenant")


@dataclass
class Stats:
    """``counts``: field to value to requests. ``rules``: rule to hits that were enforced. ``detectors``: detector to
    what became of its score. ``times_ms``: kind of time to its values. ``other_lines``: lines that are no entries, or
    not in the chain: left out."""

    requests: int = 0
    other_lines: int = 0
    first_time: str | None = None
    last_time: str | None = None
    counts: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in COUNTED})
    rules: Counter[str] = field(default_factory=Counter)
    detectors: dict[str, Counter[str]] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    captured: int = 0
    times_ms: dict[str, array[float]] = field(default_factory=dict)

    def add(self, entry: Entry | None) -> None:
        if entry is None:
            self.other_lines += 1
            return
        count = entry.get("count")
        requests = count if isinstance(count, int) else 1  # entries of earlier versions have no count
        self.requests += requests
        if isinstance(time := entry.get("time"), str):
            self.first_time = min(self.first_time or time, time)
            self.last_time = max(self.last_time or time, time)
        for name, counter in self.counts.items():
            counter[str(entry.get(name) or "-")] += requests
        self.rules.update(map(str, entry.get("rules") or ()))
        answer = entry.get("answer") or {}
        # One that was scored on both counts by the prompt, as in the metrics.
        for name, status in {**(answer.get("detectors") or {}), **(entry.get("detectors") or {})}.items():
            self.detectors.setdefault(str(name), Counter())[str(status).partition(":")[0]] += 1
        tokens = entry.get("tokens") or {}
        self.prompt_tokens += tokens.get("prompt") or 0
        self.completion_tokens += tokens.get("completion") or 0
        self.captured += entry.get("captured") is not None
        for name, value in (entry.get("timings_ms") or {}).items():
            if isinstance(value, int | float):
                self.times_ms.setdefault(str(name), array("d")).append(value)

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "other_lines": self.other_lines,
            "first_time": self.first_time,
            "last_time": self.last_time,
            **{name: dict(counter.most_common()) for name, counter in self.counts.items()},
            "rules": dict(self.rules.most_common()),
            "detectors": {name: dict(counter.most_common()) for name, counter in self.detectors.items()},
            "tokens": {"prompt": self.prompt_tokens, "completion": self.completion_tokens},
            "captured": self.captured,
            "times_ms": {name: quantiles(values) for name, values in self.times_ms.items()},
        }

    def lines(self) -> list[str]:
        """For people."""
        told = [f"{self.requests} requests, {self.first_time or '-'} to {self.last_time or '-'}"]
        if self.other_lines:
            told.append(f"{self.other_lines} lines are no entries, or not in the chain: left out")
        told += [f"{name}: {_counts(counter)}" for name, counter in self.counts.items() if counter]
        told.append(f"rules that hit: {_counts(self.rules) or 'none'}")
        told += [f"detector {name}: {_counts(counter)}" for name, counter in sorted(self.detectors.items())]
        told.append(f"tokens: {self.prompt_tokens} of prompts, {self.completion_tokens} of answers")
        told.append(f"requests with captured text: {self.captured}")
        for name, values in self.times_ms.items():
            shown = ", ".join(f"{quantile} {value:.3g} ms" for quantile, value in quantiles(values).items())
            told.append(f"time {name}: {shown}")
        return told


def stats(entries: Iterable[Entry | None]) -> Stats:
    found = Stats()
    for entry in entries:
        found.add(entry)
    return found


def quantiles(values: array[float]) -> dict[str, float]:
    """The nearest value for each of ``QUANTILES``, and the greatest."""
    ordered = sorted(values)
    found = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in QUANTILES.items()}
    return {**found, "max": ordered[-1]}


def one_line(entry: Entry) -> str:
    """When, what was decided and by which rule, for whom, how it ended, how long it took."""
    timings, status = entry.get("timings_ms") or {}, entry.get("status")
    total = timings.get("total")
    columns = (
        str(entry.get("time") or "-"),
        f"{entry.get('action') or '-'!s:<6}",
        f"{entry.get('rule') or '-'!s:<20}",
        str(entry.get("policy") or "-"),
        str(entry.get("model") or "-"),
        f"{status or '-'} {entry.get('outcome') or '-'}",
        f"{total:.0f} ms" if isinstance(total, int | float) else "-",
        str(entry.get("request_id")),
        *((f"({count} requests like it)",) if isinstance(count := entry.get("count"), int) and count > 1 else ()),
        *(() if chained(entry) else ("(not in the chain)",)),
    )
    return _plain("  ".join(columns))


def _counts(counter: Counter[str]) -> str:
    return _plain(", ".join(f"{value} {count}" for value, count in counter.most_common()))


def _plain(text: str) -> str:
    """Names that a client chose may have characters that a terminal acts upon."""
    return "".join(one if one.isprintable() else "?" for one in text)
