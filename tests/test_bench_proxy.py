"""The load benchmark as it is run, in small: stub engine, proxy and client, and the page that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.proxy.report import BEGIN, END, added_table, ratio_table, write_page

ROOT = Path(__file__).parent.parent


def row(case: str, variant: str, number: int = 0, **more: Any) -> dict[str, Any]:
    found = {"round": number, "case": case, "variant": variant, "requests_per_s": 10.0, "cpu_ms_per_request": 1.0}
    found |= {"waited_ms_per_request": 0.0, "wrong": 0, "load_average": 0.5}
    return {**found, "first_ms": {"p50": 1.0, "p99": 2.0}, "total_ms": {"p50": 1.0, "p99": 2.0}, **more}


def test_a_run_finds_every_answer_as_the_engine_sent_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench.proxy.load", "--cases", "whole,streamed", "--rounds", "1"]
    done = subprocess.run([*command, "--seconds", "0.5", "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [(one["wrong"], one["errors"]) for one in result["rows"]] == [(0, [])] * 4
    assert all(one["counted"] > 0 for one in result["rows"])
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_page(page, [("out", result)])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert result["machine"] in text


def test_ratios_are_within_a_round_and_a_miss_is_said() -> None:
    rows = [row("whole", "guard"), row("whole", "litellm", cpu_ms_per_request=4.0, requests_per_s=1.0)]
    rows += [row("whole", "guard", 1), row("whole", "litellm", 1, cpu_ms_per_request=4.5, requests_per_s=2.0)]
    text = "\n".join(ratio_table(rows))
    assert "7.5 (5 to 10)" in text
    assert "4.25 (4 to 4.5)" in text
    assert "≥ 5: **missed** by 0.75" in text


def test_added_latency_is_a_quantile_minus_the_engines_own() -> None:
    rows = [row("whole", "direct"), row("whole", "guard", total_ms={"p50": 1.5, "p99": 9.0})]
    text = "\n".join(added_table(rows))
    assert "p50 ≤ 1: met; p99 ≤ 5: **missed** by 2" in text


def test_a_table_without_rows_is_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    rows = [{**row("whole", variant), "load_average": 0.5, "wrong": 0} for variant in ("direct", "guard")]
    run = {"versions": {}, "time": "now", "commit": "c", "machine": "m", "command": ["c"], "rows": rows}
    write_page(page, [("run", run)])
    assert "LiteLLM" not in page.read_text()
    lines = page.read_text().splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("| ---")]
    assert heads
    assert all(lines[i + 1].startswith("| ") for i in heads)


def test_a_page_without_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ValueError, match="has no"):
        write_page(tmp_path / "page.md", [])
