"""An evaluation on rows that a detector has seen says so, whether or not its file says which these were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from detectors.calibration.provenance import data_sources
from detectors.calibration.rows import Row, default_rows
from detectors.calibration.seen_rows import seen_digests, seen_remark
from detectors.model_config import Calibration
from detectors.probe import Probe
from guard.data import data_folder

FILE = Path("model_configs/probe/tiny.json")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return default_rows(seed=0, tool_role=True)


@pytest.fixture(scope="module", params=["with digests", "of an older version"])
def calibration(request: pytest.FixtureRequest, rows: list[Row]) -> Calibration:
    """A record of these rows, with the shipped one's figures."""
    shipped = Probe.load(data_folder("model_configs") / "probe" / "SmolLM2-135M-Instruct.json").config.calibration
    assert shipped is not None
    digests = seen_digests(rows) if request.param == "with digests" else ""
    return shipped.model_copy(update={"data": data_sources(rows), "seen_rows": digests, "seed": 0})


def test_on_the_rows_of_its_calibration_nothing_is_said(calibration: Calibration, rows: list[Row]) -> None:
    assert seen_remark(calibration, FILE, rows, 0) == ""
    positions = replace(rows[0], id="p", source="positions", split="held_out", text="a text of its own")
    assert seen_remark(calibration, FILE, [*rows, positions], 0) == ""


def test_another_seed_measures_on_rows_that_were_seen(calibration: Calibration) -> None:
    other = default_rows(seed=1, tool_role=True)
    said = seen_remark(calibration, FILE, other, 1)
    assert "flatter it" in said
    assert calibration.command in said
    if calibration.seen_rows:
        seen = {row.text for row in default_rows(seed=0, tool_role=True) if row.split != "held_out"}
        held_out = [row for row in other if row.split == "held_out"]
        assert said.startswith(f"{sum(row.text in seen for row in held_out)} of the {len(held_out)} rows")


def test_rows_that_were_seen_under_another_name_are_known_by_their_text(
    rows: list[Row], calibration: Calibration
) -> None:
    mine = [replace(row, id=f"mine-{i}", source="mine.jsonl", split="held_out") for i, row in enumerate(rows[:200])]
    said = seen_remark(calibration, FILE, mine, 0)
    seen = sum(row.split != "held_out" for row in rows[:200])
    # Without digests nobody can tell.
    assert said.startswith(f"{seen} of the 200 rows") if calibration.seen_rows else said == ""


def test_fewer_of_the_same_rows_are_no_others_where_the_file_can_tell(
    rows: list[Row], calibration: Calibration
) -> None:
    said = seen_remark(calibration, FILE, rows[::2], 0)
    assert (said == "") == bool(calibration.seen_rows)


def test_the_tool_call_probe_is_known_by_the_rows_that_it_reads(rows: list[Row], calibration: Calibration) -> None:
    read = [row for row in rows if row.place == "tool"]
    in_order = [row for split in ("train", "validation", "held_out") for row in read if row.split == split]
    record = calibration.model_copy(update={"data": data_sources(in_order)})
    assert seen_remark(record, FILE, read, 0) == ""
