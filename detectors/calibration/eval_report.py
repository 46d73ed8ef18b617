"""The evaluation as one HTML file: tables, ROC curves and score plots. Self-contained: no script, no font, no address.

Owns how a report looks; what is in it is ``evaluation``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from detectors.calibration.evaluation import COUNTED_APART, AtThreshold, Curve, DetectorReport, Hits, Measured
from detectors.calibration.split import SPLITS
from detectors.numerals import numeral

COLOURS = ("#0b6e99", "#b3541e", "#4d7c0f", "#7c3aed", "#be123c", "#0f766e")
SIZE, MARGIN = 360, 44

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1b1f23;max-width:1080px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.2rem}h3{font-size:1rem}
table{border-collapse:collapse;margin:.6rem 0 1.2rem}
td,th{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd}
th{font-weight:600;background:#f5f6f7}td:first-child,th:first-child{text-align:left}
figure{display:inline-block;margin:0 1rem 1rem 0}figcaption{font-size:.85rem;color:#555}
svg text{font:11px system-ui,sans-serif;fill:#444}.note{color:#555;font-size:.9rem}
.warning{border-left:4px solid #be123c}
@media(prefers-color-scheme:dark){body{background:#14171a;color:#e4e6e8}th{background:#22272b}td,th{border-color:#333}
svg text{fill:#bbb}.note,figcaption{color:#aaa}}
"""


def html(about: Mapping[str, Any], reports: Mapping[str, DetectorReport]) -> str:
    """``about``: what was measured, with what and when, as in the JSON; each entry one line, but ``data``."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>Detectors of {escape(str(about['model']))}</title><style>{STYLE}</style></head><body>",
        f"<h1>Detectors of {escape(str(about['model']))}</h1>",
        _table(("", ""), [(key, _one_line(value)) for key, value in about.items() if key != "data"]),
        "<p class=note>Held-out rows, which nothing was fitted to or chosen on. Intervals are 95 %: bootstrap over "
        "groups of rows for measures, exact (Clopper-Pearson) for shares, with as many trials as there are groups: "
        "rows of one group are nearly the same or of one family.</p>",
        f"<p class=note>{COUNTED_APART}</p>",
        *_remarks(reports),
        "<h2>All sets together</h2>",
        _measures(((name, report.pooled) for name, report in reports.items()), "detector"),
        roc_plot({name: report.curve for name, report in reports.items()}),
    ]
    for name, report in reports.items():
        parts.append(score_plot(name, report.curve))
    for name, report in reports.items():
        parts += _detector(name, report)
    parts += ["<h2>Data</h2>", _data(about.get("data", ()))]
    return "\n".join([*parts, "</body></html>"])


def _remarks(reports: Mapping[str, DetectorReport]) -> list[str]:
    """Before any figure that they are about."""
    said = [f"<li>{escape(name)}: {escape(one)}</li>" for name, report in reports.items() for one in report.remarks]
    return ["<h2>Not to be trusted</h2>", f"<ul class=warning>{''.join(said)}</ul>"] if said else []


def _one_line(value: Any) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, Mapping) else str(value)


def _data(sources: Sequence[Mapping[str, Any]]) -> str:
    """How many benign rows and attacks of each set are in which split."""
    rows = [
        (
            source["name"],
            source["version"],
            source["licence"],
            *(
                " + ".join(str(source["rows"].get(split, {}).get(label, 0)) for label in ("benign", "attack"))
                for split in SPLITS
            ),
            source["sha256"][:12],
        )
        for source in sources
    ]
    return _table(("set", "version", "licence", *(f"{split}, benign + attacks" for split in SPLITS), "SHA-256"), rows)


def _detector(name: str, report: DetectorReport) -> list[str]:
    parts = [f"<h2>{escape(name)}</h2>"]
    if report.left_out:
        parts += [
            "<h3>Each set left out</h3>",
            "<p class=note>Fitted without the set and what is nearly the same elsewhere, then measured on all of its "
            "rows.</p>",
            _measures(report.left_out.items(), "set"),
        ]
    for kind, slices in report.slices.items():
        parts += [f"<h3>By {escape(kind)}</h3>", _measures(slices.items(), kind)]
    for threshold, at in report.thresholds.items():
        parts += [f"<h3>At {escape(threshold)} = {numeral(at.value)}</h3>", _at(at)]
    return parts


def _at(at: AtThreshold) -> str:
    names = list(dict.fromkeys([*at.false_positives_of, *at.caught_of]))
    rows = [("all", _hits(at.false_positives), _hits(at.caught))]
    rows += [(name, _hits(at.false_positives_of.get(name)), _hits(at.caught_of.get(name))) for name in names]
    return _table(("rows", "false positives", "attacks caught"), rows)


def _hits(hits: Hits | None) -> str:
    if hits is None:
        return ""
    different = "" if hits.groups == hits.rows else f", {hits.groups} different"
    return f"{hits.hits} of {hits.rows}{different} ({hits.interval[0]:.1%} to {hits.interval[1]:.1%})"


def _measures(named: Iterable[tuple[str, Measured]], heading: str) -> str:
    rows = [
        (
            name,
            f"{m.benign}" + ("" if m.benign_from == "itself" else f" ({m.benign_from})"),
            m.attack,
            _with(m.auroc, m.auroc_interval, ".3f"),
            _with(m.auprc, m.auprc_interval, ".3f"),
            _with(m.tpr_1pct, m.tpr_1pct_interval, ".0%"),
            _with(m.tpr_0_1pct, m.tpr_0_1pct_interval, ".0%"),
        )
        for name, m in named
    ]
    return _table((heading, "benign", "attacks", "AUROC", "AUPRC", "caught at 1 %", "caught at 0.1 %"), rows)


def _with(value: float, interval: tuple[float, float], form: str) -> str:
    return f"{value:{form}} ({interval[0]:{form}} to {interval[1]:{form}})"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def roc_plot(curves: Mapping[str, Curve]) -> str:
    """True against false positive rate, the latter on a logarithmic scale from 0.1 %, where guards are run."""
    span = SIZE - MARGIN - 12

    def x(rate: float) -> float:
        return MARGIN + span * (math.log10(max(rate, 0.001)) + 3) / 3

    def y(rate: float) -> float:
        return SIZE - MARGIN - (SIZE - MARGIN - 12) * rate

    parts = [f'<svg role="img" aria-label="ROC curves" width="{SIZE + 190}" height="{SIZE}">']
    for rate, label in ((0.001, "0.1 %"), (0.01, "1 %"), (0.1, "10 %"), (1.0, "100 %")):
        parts.append(_line(x(rate), y(0), x(rate), y(1), "#ccc"))
        parts.append(f'<text x="{x(rate):.1f}" y="{SIZE - MARGIN + 16}" text-anchor="middle">{label}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_line(x(0.001), y(share), x(1), y(share), "#ccc"))
        parts.append(f'<text x="{MARGIN - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(f"{x(false):.1f},{y(true):.1f}" for false, true in curve.roc)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{SIZE + 6}" y="{24 + 20 * i}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{SIZE + 24}" y="{29 + 20 * i}">{escape(name)}</text>')
    parts.append("</svg>")
    caption = "Attacks caught (upright) at each rate of false positives (across, logarithmic)"
    return f"<figure>{''.join(parts)}<figcaption>{caption}</figcaption></figure>"


def score_plot(name: str, curve: Curve) -> str:
    """How many benign rows and attacks lie in each equal part of all rows by score."""
    most = max([*curve.benign, *curve.attack, 1])
    bins, height = len(curve.benign), 150
    width = (SIZE - MARGIN - 12) / bins
    parts = [f'<svg role="img" aria-label="scores of {escape(name)}" width="{SIZE}" height="{2 * height + 30}">']
    middle = height + 4
    for i, (benign, attack) in enumerate(zip(curve.benign, curve.attack, strict=True)):
        left = MARGIN + i * width
        up, down = height * attack / most, height * benign / most
        parts.append(_bar(left, middle - up, width, up, COLOURS[1]))
        parts.append(_bar(left, middle, width, down, COLOURS[0]))
    parts.append(_line(MARGIN, middle, SIZE - 12, middle, "#888"))
    parts.append(f'<text x="2" y="{middle - 6}">attacks</text><text x="2" y="{middle + 14}">benign</text></svg>')
    caption = f"{escape(name)}: rows in order of score, low to high, in {bins} equal parts"
    return f"<figure>{''.join(parts)}<figcaption>{caption}</figcaption></figure>"


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" height="{height:.1f}" fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
