"""The table of ``docs/detectors.md`` on windows, made from what ``measure_windows`` recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = "smollm2-135m-windows.json"
FITTED = "smollm2-135m-windows-fitted.json"
"""Of probes that were fitted with windows, beside the shipped one without."""
BEGIN, END = "<!-- windows: begin -->", "<!-- windows: end -->"

ATTENTION_ALONE = "one pass,"
PARTS = {"positions": "prose", "held_out": "package texts"}


def markdown(results: Path) -> str:
    """Everything between the markers. Of the scalings of one pass the best by the choosing half."""
    lines = _table(json.loads((results / RESULTS).read_text(encoding="utf-8")))
    if (results / FITTED).is_file():
        lines += ["", *_table(json.loads((results / FITTED).read_text(encoding="utf-8")))]
    return "\n".join(lines)


def _table(found: Mapping[str, Any]) -> list[str]:
    about, candidates = found["about"], found["candidates"]
    counts = about["cases"]
    told = {part: f"{counts[part]['attack']} attacked, {counts[part]['benign']} benign" for part in PARTS}
    passes = [name for name in candidates if not name.startswith(ATTENTION_ALONE)]
    stretches = [name for name in candidates if name.startswith(ATTENTION_ALONE)]
    best = sorted(stretches, key=lambda name: -candidates[name]["chosen"]["choosing_out_of_fold_auroc"])[:1]
    columns = [f"AUROC, {name} ({told[part]})" for part, name in PARTS.items()]
    columns += [
        f"{limit}, {name}"
        for name in PARTS.values()
        for limit in ("`fpr_1pct` reached by attacked, benign", "top part is the attack")
    ]
    lines = [
        f"{about['model']}, {about['date']}, `{about['command']}`.",
        "",
        f"| read | {' | '.join(columns)} |",
        "| --- |" + " --- |" * len(columns),
    ]
    for name in (*passes, *best):
        one = candidates[name]
        cells = [_area(one[part]) for part in PARTS]
        for part in PARTS:
            cells += [_reach(one[part]), _top(one[part])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, one in about.get("named", {}).items():
        lines += ["", f"`{name}` (`{one['command']}`), how many reach its thresholds, as its file says:", ""]
        lines += _parts(one["thresholds"], one["parts"])
    return lines


def _parts(thresholds: Mapping[str, float], parts: Mapping[str, Any]) -> list[str]:
    head = [f"`{name}`, at least {value:.3f}" for name, value in thresholds.items()]
    lines = [f"| rows | {' | '.join(head)} |", f"| --- |{' --- |' * len(head)}"]
    for name, one in parts.items():
        cells = []
        for point in thresholds:
            low, high = one["intervals"][point]["low"], one["intervals"][point]["high"]
            cells.append(f"{one['hits'][point]} of {one['rows']} ({low:.1%} to {high:.1%})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _area(one: Mapping[str, Any]) -> str:
    low, high = one["auroc_interval"]
    return f"{one['auroc']:.3f} ({low:.3f} to {high:.3f})"


def _reach(one: Mapping[str, Any]) -> str:
    """At the detector's own threshold for 1 %."""
    at = next((reach for name, reach in one["reach"].items() if name.startswith("fpr_1pct")), None)
    return "" if at is None else f"{at['attack']} of {one['attack']}, {at['benign']} of {one['benign']}"


def _top(one: Mapping[str, Any]) -> str:
    return f"{one['top_is_the_attack']:.0%}, by chance {one['top_by_chance']:.0%}" if one["top_by_chance"] else ""
