"""What a dashboard is made of: pages of rows of panels of queries, without anything of Grafana.

Owns these types and the variables that queries may use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Form = Literal["lines", "stacked", "number", "heatmap", "table"]
MEANING: Mapping[str, Mapping[str, str]] = {
    "{{action}}": {"allow": "green", "flag": "yellow", "steer": "orange", "block": "red"},
    "{{outcome}}": {
        **{"completed": "green", "blocked": "orange", "refused": "yellow", "guard_unavailable": "red"},
        **{"upstream_error": "red", "upstream_unavailable": "red", "upstream_broken": "red", "internal_error": "red"},
    },
}
"""By legend: colours, by Grafana's names, of the values that have a meaning; others get whatever comes."""

Unit = Literal["reqps", "percentunit", "s", "short", "none", "Bps", "cps", "dateTimeFromNow"]
"""Grafana's names."""

EVERYWHERE: Mapping[str, str] = {
    "job": "label_values(guard_build_info, job)",
    "engine": "label_values(vllm:num_requests_running, job)",
}
"""Variables of every page, whose values are asked of Prometheus: the proxies, and vLLM's servers."""


@dataclass(frozen=True)
class Query:
    """``legend``: Grafana's template, with labels in double braces."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One question. ``width``: of 24. ``empty``: when its queries may rightly have no data; else that is a fault.
    ``thresholds``: from which values on a number is yellow, and red; the other way round where less is worse."""

    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: Unit = "short"
    form: Form = "lines"
    width: int = 8
    empty: str = ""
    thresholds: tuple[float, float] | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Page:
    """``variables``: beside those of every page, each one or several values of a label."""

    uid: str
    title: str
    meaning: str
    rows: tuple[Row, ...]
    variables: Mapping[str, str]
    several: bool = True

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def quantiles(metric: str, selector: str, *, by: str = "", legend: str = "") -> tuple[Query, ...]:
    """Median, 90th and 99th percentile of a histogram. selector: without braces. by: a label."""
    return tuple(
        Query(quantile(share, metric, selector, by=by), f"{legend} {name}".strip())
        for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )


def quantile(share: float, metric: str, selector: str, *, by: str = "") -> str:
    grouped = f"{by}, le" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({grouped}) (rate({metric}_bucket{{{selector}}}[$__rate_interval])))"


def rate(metric: str, selector: str, *, by: str = "") -> str:
    """Of a counter, a second; the sum over all labels, or by some."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{selector}}}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Nothing where the whole is 0."""
    return f"{part} / ({whole} > 0)"
