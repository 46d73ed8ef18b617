"""Writes ``docs/metrics.md`` from the declarations: ``python -m guard.telemetry.reference > docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterable

from guard.mia.metrics import ENGINE
from guard.telemetry.families import PROXY
from guard.telemetry.family import Family, Values

HEAD = """\
# Metrics

Written by `python -m guard.telemetry.reference`; a test compares. Names, labels and their values are a contract:
dashboards and alerts in [dashboards](../dashboards/README.md) rely on them, and a change of them is in the
[changelog](../CHANGELOG.md).

No label holds anything that a client chooses. Every series exists before the first request, so that a rate is 0 and
not absent. Series of a policy, rule or detector that is gone go with the second change of policies after it; where
several worker processes share one port they stay. Histograms have `_bucket`, `_sum` and `_count`.

Beside each counter and histogram stands a gauge that says when it began, in seconds since 1970: its name without
`_total`, and with `_created` (`guard_requests_created`, `mia_queue_wait_seconds_created`). prometheus-client makes it
in every program, vLLM too; `PROMETHEUS_DISABLE_CREATED_SERIES=true` leaves all out, and where several processes count
together there are none.
"""
OF_THE_PROXY = """
## The proxy
`GET /metrics` on the proxy's port. Where several worker processes share one port, each answers with the numbers of all:
counters and histograms are added up, those of processes that ended too, gauges merged as the table says.
"""
OF_THE_ENGINE = """
## The engine's side
Under vLLM's own `/metrics`, beside `vllm:*`. Counted in the API server, once a request or readout; where vLLM runs
several API servers it merges them as its own. Courier lag is the difference of two clocks where the worker runs on
another machine than the API server.
"""


def reference() -> str:
    """The page."""
    return f"{HEAD}{OF_THE_PROXY}\n{_table(PROXY)}{OF_THE_ENGINE}\n{_table(ENGINE)}"


def _table(families: Iterable[Family]) -> str:
    rows = [
        f"| `{one.name}` | {_kind(one)} | {'<br>'.join(_label(*pair) for pair in one.labels.items()) or 'none'} "
        f"| {one.meaning} |"
        for one in families
    ]
    return "\n".join(["| metric | type | labels | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _kind(family: Family) -> str:
    if family.kind == "gauge":
        return f"gauge, {family.merged}"
    if family.kind == "histogram":
        return f"histogram, {family.buckets[0]:g} to {family.buckets[-1]:g}"
    return family.kind


def _label(name: str, values: Values) -> str:
    return f"`{name}`: {values}" if isinstance(values, str) else f"`{name}`: " + ", ".join(f"`{one}`" for one in values)


if __name__ == "__main__":
    print(reference(), end="")
