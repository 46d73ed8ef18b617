"""Writes what was measured of the proxy under load into ``docs/benchmarks.md``.

    python -m bench.proxy.report bench/results/FILE.json [MORE.json ...]

Owns the part of the page between its two markers. No figure there is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.children import ROOT
from bench.goals import at_least, at_most
from bench.report import table

BEGIN, END = "<!-- bench.proxy.report begins -->", "<!-- bench.proxy.report ends -->"
PAGE = ROOT / "docs" / "benchmarks.md"

TITLES = {
    "whole": "64 clients without a pause, whole answers",
    "streamed": "64 clients without a pause, streams of 64 tokens",
    "steady-whole": "64 clients that pause a quarter of a second, whole answers",
    "steady-streamed": "64 clients that pause a quarter of a second, streams",
    "paced-whole": "64 clients that pause a second, whole answers",
    "paced-streamed": "64 clients that pause a second, streams",
    "alone-whole": "one client, whole answers",
    "alone-streamed": "one client, streams",
}
NAMES = {"direct": "stub engine", "guard": "guard", "litellm": "LiteLLM"}
ADDED_P50_MS, ADDED_P99_MS, TIMES_BETTER = 1.0, 5.0, 5.0
FLAT = 1.02
"""Memory at the end of the soak, as a share of that after its first minute: at most."""

Row = Mapping[str, Any]
Cell = tuple[int, str, str]


def by_cell(rows: Sequence[Row]) -> dict[Cell, Row]:
    return {(row["round"], row["case"], row["variant"]): row for row in rows}


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def ratios(rows: Sequence[Row], case: str, name: str, upside_down: bool = False) -> list[float]:
    """Of LiteLLM to ours within each round; ``upside_down``: of ours to LiteLLM."""
    cells = by_cell(rows)
    pairs = [
        (cells[number, case, "litellm"][name], cells[number, case, "guard"][name])
        for number, found, variant in cells
        if found == case and variant == "guard" and (number, case, "litellm") in cells
    ]
    pairs = [(b, a) if upside_down else (a, b) for a, b in pairs]
    return [a / b for a, b in pairs if b]


def used_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for case in ("whole", "streamed"):
        for variant in NAMES:
            mine = [row for row in rows if row["case"] == case and row["variant"] == variant]
            if mine:
                lines.append(
                    (
                        TITLES[case],
                        NAMES[variant],
                        spread([row["requests_per_s"] for row in mine]),
                        spread([row["cpu_ms_per_request"] for row in mine]),
                        spread([row["waited_ms_per_request"] for row in mine]),
                        str(sum(row["wrong"] for row in mine)),
                    )
                )
    return table(("load", "asked", "requests/s", "CPU ms a request", "waited for a processor, ms", "wrong"), lines)


def ratio_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for case in ("whole", "streamed"):
        for name, title, upside_down in (
            ("requests_per_s", "requests/s", True),
            ("cpu_ms_per_request", "CPU a request", False),
        ):
            found = ratios(rows, case, name, upside_down)
            if found:
                verdict = at_least(statistics.median(found), TIMES_BETTER)
                lines.append((TITLES[case], title, spread(found), str(len(found)), verdict))
    return table(("load", "how many times better than LiteLLM", "median (least to most)", "rounds", "goal"), lines)


def added_table(rows: Sequence[Row]) -> list[str]:
    """A quantile through a proxy minus the same of the stub engine, within each round."""
    cells, lines = by_cell(rows), []
    for case in TITLES:
        for variant in ("guard", "litellm"):
            pairs = [
                (cells[number, case, variant], cells[number, case, "direct"])
                for number, found, name in cells
                if found == case and name == variant and (number, case, "direct") in cells
            ]
            for what, title in (("first_ms", "first token"), ("total_ms", "whole answer")):
                # Of whole answers both are the same.
                if what == "first_ms" and "streamed" not in case:
                    continue
                added = {
                    q: [through[what][q] - direct[what][q] for through, direct in pairs if through[what]]
                    for q in ("p50", "p99")
                }
                if not added["p50"]:
                    continue
                ours = variant == "guard"
                goals = {"p50": ADDED_P50_MS, "p99": ADDED_P99_MS}
                verdicts = [at_most(statistics.median(added[q]), goal) for q, goal in goals.items()]
                lines.append(
                    (
                        TITLES[case],
                        NAMES[variant],
                        title,
                        spread(added["p50"]),
                        spread(added["p99"]),
                        spread([through["waited_ms_per_request"] for through, _ in pairs]),
                        f"p50 {verdicts[0]}; p99 {verdicts[1]}" if ours else "",
                    )
                )
    head = ("load", "through", "of the", "added p50 ms", "added p99 ms", "waited for a processor, ms a request")
    return table((*head, "goal, by the median"), lines)


def soak_lines(soak: Mapping[str, Any]) -> list[str]:
    settled = [one for one in soak["memory"] if one["at_s"] >= 60]
    first, last = settled[0]["rss_mib"], settled[-1]["rss_mib"]
    most = max(one["rss_mib"] for one in settled)
    return [
        f"- {soak['most_open']} streams at once, {soak['seconds']:.0f} s: {soak['counted']} answers, {soak['wrong']} "
        f"of them wrong; CPU {soak['cpu_ms_per_request']:.3g} ms a request of 200 tokens.",
        f"- Memory after the first minute {first:.1f} MiB, at the end {last:.1f} MiB, most {most:.1f} MiB: "
        f"{last / first:.4f} of it, {at_most(last / first, FLAT)}.",
        "",
    ]


def sections(results: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        f"Run of {results['time']}, commit {results['commit']}. {results['machine']}. {versions}.",
        f"Command: `{' '.join(results['command'])}`",
        "",
    ]
    if rows := results.get("rows"):
        loads = [row["load_average"] for row in rows]
        lines += [
            f"Load average of the machine meanwhile, other people's programs with it: {spread(loads)}.",
            "",
            *used_table(rows),
            *ratio_table(rows),
            *added_table(rows),
        ]
    if soak := results.get("soak"):
        lines += soak_lines(soak)
    return lines


def write_page(page: Path, runs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Put all runs between the page's markers. Raises ``ValueError`` when it has none."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no {BEGIN} and {END}")
    lines = [line for name, results in runs for line in (f"### {name}", "", *sections(results))]
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    page.write_text(before + BEGIN + "\n" + "\n".join(lines).strip() + "\n" + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="+")
    options = parser.parse_args()
    write_page(PAGE, [(file.stem, json.loads(file.read_text())) for file in options.file])
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
