"""Pages as Grafana's JSON, built with Grafana's own SDK, so that every field is one that Grafana knows.

Owns the look: sizes, colours, variables. Needs ``grafana-foundation-sdk``, which only who changes dashboards has.
"""

from __future__ import annotations

import json
from itertools import count

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.dashboard import Row as RowBuilder
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, prometheus
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

from guard.dashboards.panel import EVERYWHERE, MEANING, Page, Panel, Query

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "mia-guard"
HEIGHTS = {"number": 4}
HEIGHT = 8
GREEN, YELLOW, RED = "green", "yellow", "red"

Built = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel


def to_json(page: Page) -> str:
    """The dashboard as a file of its own."""
    board = (
        Dashboard(page.title)
        .uid(page.uid)
        .description(page.meaning)
        .tags([TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(DashboardLink("Guard").type(DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True).as_dropdown(True))
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for name, query in EVERYWHERE.items():
        board.with_variable(_variable(name, query, several=True))
    for name, query in page.variables.items():
        board.with_variable(_variable(name, query, several=page.several))
    ids = count(1)
    for row in page.rows:
        board.with_row(RowBuilder(row.title).id(next(ids)))
        for panel in row.panels:
            board.with_panel(_built(panel).id(next(ids)))
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(board.build())), indent=1) + "\n"


def _variable(name: str, query: str, *, several: bool) -> QueryVariable:
    variable = (
        QueryVariable(name)
        .query(query)
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(several)
    )
    return variable.include_all(True) if several else variable


def _built(panel: Panel) -> Built:
    built = _form(panel)
    built.title(panel.title).description(_description(panel)).datasource(SOURCE).unit(panel.unit)
    built.span(panel.width).height(HEIGHTS.get(panel.form, HEIGHT))
    for number, query in enumerate(panel.queries):
        built.with_target(_target(panel, query, chr(ord("A") + number)))
    return built


def _description(panel: Panel) -> str:
    return f"{panel.meaning} Empty when {panel.empty}." if panel.empty else panel.meaning


def _form(panel: Panel) -> Built:
    if panel.form == "number":
        return (
            stat.Panel()
            .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
            .graph_mode(common.BigValueGraphMode.AREA)
            .color_mode(common.BigValueColorMode.VALUE)
            .thresholds(_thresholds(panel))
        )
    if panel.form == "heatmap":
        return heatmap.Panel()
    if panel.form == "table":
        return table.Panel()
    lines = (
        timeseries.Panel()
        .fill_opacity(10)
        .line_width(1)
        .show_points(common.VisibilityMode.NEVER)
        .min(0)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
        )
    )
    for word, colour in MEANING.get(panel.queries[0].legend, {}).items():
        fixed = DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})
        lines.override_by_name(word, [fixed])
    if panel.form == "stacked":
        lines.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL)).fill_opacity(40)
    return lines


def _thresholds(panel: Panel) -> ThresholdsConfig:
    """Of a number; without any it stays green."""
    config = ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE)
    if panel.thresholds is None:
        return config.steps([Threshold(color=GREEN)])
    yellow, red = panel.thresholds
    if yellow <= red:
        return config.steps([Threshold(color=GREEN), Threshold(yellow, YELLOW), Threshold(red, RED)])
    return config.steps([Threshold(color=RED), Threshold(red, YELLOW), Threshold(yellow, GREEN)])


def _target(panel: Panel, query: Query, ref_id: str) -> Dataquery:
    target = Dataquery().datasource(SOURCE).expr(query.expr).legend_format(query.legend).ref_id(ref_id)
    if panel.form == "heatmap":
        return target.range().format(prometheus.PromQueryFormat.HEATMAP)
    if panel.form == "table":
        return target.instant().format(prometheus.PromQueryFormat.TABLE)
    return target.range()
