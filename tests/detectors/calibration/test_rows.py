"""The rows that calibration reads: no idea crosses splits, nothing but the text tells attacks from benign rows."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from detectors.calibration.rows import Row, default_rows, rows_hash
from detectors.calibration.sources import DataError, own_documents, own_frames, spikee_instructions
from detectors.calibration.split import SPLITS


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return default_rows(seed=0)


def test_no_group_is_in_two_splits(rows: list[Row]) -> None:
    splits = defaultdict(set)
    for row in rows:
        splits[row.group].add(row.split)
    assert [group for group, where in splits.items() if len(where) > 1] == []


@pytest.mark.parametrize("what", ["documents", "instructions"])
def test_no_building_block_of_an_attack_is_in_two_splits(rows: list[Row], what: str) -> None:
    blocks = own_documents() if what == "documents" else spikee_instructions()
    seen = 0
    for block in blocks:
        needle = block.text.split("\n")[0]
        found = {row.split for row in rows if needle in row.text and row.source != "bastioncorpus"}
        assert len(found) <= 1, block.id
        seen += len(found)
    assert seen > len(blocks) / 2


def test_every_split_has_rows_of_both_labels_from_every_source_that_has_both(rows: list[Row]) -> None:
    counts = Counter((row.source, row.split, row.label) for row in rows)
    for split in SPLITS:
        for label in ("benign", "attack"):
            assert counts["bastioncorpus", split, label] >= 15
        assert sum(counts[source, split, "benign"] for source in ("own", "spikee", "bastioncorpus")) >= 150


def test_surroundings_are_spread_over_both_labels_alike(rows: list[Row]) -> None:
    systems = {label: Counter[str]() for label in ("benign", "attack")}
    openings = {label: 0 for label in ("benign", "attack")}
    for row in rows:
        systems[row.label][row.messages[0]["content"]] += 1
        openings[row.label] += len(row.messages) > 2
    totals = Counter(row.label for row in rows)
    for text in own_frames().systems:
        shares = [systems[label][text] / totals[label] for label in systems]
        assert abs(shares[0] - shares[1]) < 0.06
    assert abs(openings["benign"] / totals["benign"] - openings["attack"] / totals["attack"]) < 0.08


@pytest.mark.parametrize("tool_role", [False, True])
def test_conversations_end_with_the_untrusted_text_and_hold_no_placeholder(tool_role: bool) -> None:
    rows = default_rows(seed=0, tool_role=tool_role)
    assert ("tool" in {row.place for row in rows}) == tool_role
    for row in rows:
        assert row.messages[0]["role"] == "system"
        assert row.messages[-1] == {"role": "tool" if row.place == "tool" else "user", "content": row.text}
        for placeholder in ("<INSTRUCTION>", "{text}", "{canary}", "{phrase}"):
            assert placeholder not in row.text


def test_a_quoted_attack_shares_neither_frame_nor_phrase_with_another_split(rows: list[Row]) -> None:
    for part in range(2):
        splits = defaultdict(set)
        for row in rows:
            if row.id.startswith("own-frame"):
                splits[row.id.split("-own-")[part]].add(row.split)
        assert len(splits) > 10
        assert {len(found) for found in splits.values()} == {1}


def test_every_row_that_is_hard_is_benign(rows: list[Row]) -> None:
    assert {row.label for row in rows if row.hard} == {"benign"}
    assert sum(row.hard for row in rows) > 150


def test_a_set_that_is_not_known_is_refused() -> None:
    with pytest.raises(DataError, match=r"no data set nonsense; there are: .*spikee"):
        default_rows(0, ["nonsense"])


def test_ids_are_unique_and_the_seed_alone_decides(rows: list[Row]) -> None:
    assert len({row.id for row in rows}) == len(rows)
    assert rows_hash(default_rows(seed=0)) == rows_hash(rows)
    assert rows_hash(default_rows(seed=1)) != rows_hash(rows)
