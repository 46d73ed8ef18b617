"""A ledger is read across its files, from either end, and what is no entry is passed over."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from guard.telemetry.content import AnswerText, Captured, PromptText, digest, file_of
from guard.telemetry.ledger_file import LedgerFile
from guard.telemetry.ledger_files import content_folder, placed_backwards, rotated_path
from guard.telemetry.ledger_reader import LedgerReadError, captured, entries, find, find_all, recent


def entry(number: int, **fields: object) -> str:
    return json.dumps({"request_id": f"r-{number}", "number": number, **fields}, separators=(",", ":")) + "\n"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Ten entries in three files, and two lines that are none."""
    path = tmp_path / "ledger.jsonl"
    rotated_path(path, 1).write_text("".join(map(entry, range(1, 4))) + '{"request_id":"r-')
    rotated_path(path, 4).write_text("".join(map(entry, range(4, 8))))
    path.write_text("\n" + "".join(map(entry, range(8, 11))) + '{"request_id":"half')
    (tmp_path / "ledger-x.jsonl").write_text("another program's\n")
    return path


def test_recent_entries_come_newest_first_across_files(ledger: Path) -> None:
    assert [one["number"] for one in recent(ledger, 5)] == [10, 9, 8, 7, 6]
    assert [one["number"] for one in recent(ledger, 100)] == list(range(10, 0, -1))
    assert recent(ledger, 0) == []


def test_all_lines_come_in_order_and_those_that_are_no_entries_are_none(ledger: Path) -> None:
    found = [one and one["number"] for one in entries(ledger)]
    assert found == [1, 2, 3, None, 4, 5, 6, 7, None, 8, 9, 10, None]


def test_a_request_is_found_in_rotated_files_and_of_two_the_later_one(ledger: Path) -> None:
    assert (found := find(ledger, "r-2")) is not None
    assert found["number"] == 2
    with ledger.open("a") as file:
        file.write("\n" + entry(2, again=True))
    assert (found := find(ledger, "r-2")) is not None
    assert found["again"]
    assert find(ledger, "r-99") is None
    assert find(ledger, 'r-2","x') is None


def test_an_id_that_clients_sent_hides_no_request_that_has_it_as_its_own(ledger: Path) -> None:
    with ledger.open("a") as file:
        file.write("\n" + entry(99, client_request_id="r-2") + entry(98, client_request_id="r-2"))
        file.write(entry(97, client_request_id="the client's"))
    found = find_all(ledger, "r-2")
    assert found.own is not None
    assert (found.own["number"], [one["number"] for one in found.of_clients]) == (2, [98, 99])
    assert (own := find(ledger, "r-2")) is not None
    assert own["number"] == 2
    assert find(ledger, "the client's") is None
    found = find_all(ledger, "the client's")
    assert (found.own, [one["number"] for one in found.of_clients]) == (None, [97])


def test_a_line_that_is_not_in_the_chain_hides_none_that_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path)
    assert file.append([entry(1).encode().strip()]) == (1, None)
    file.close()
    with path.open("a") as forged:
        forged.write(entry(1, forged=True))
    assert (found := find(path, "r-1")) is not None
    assert "forged" not in found


def test_a_ledger_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(LedgerReadError, match=r"none\.jsonl: cannot be read: No such file"):
        recent(tmp_path / "none.jsonl", 1)


@given(st.lists(st.binary(max_size=9).map(lambda one: one.replace(b"\n", b""))), st.binary(max_size=4))
def test_lines_from_the_end_are_the_lines_from_the_beginning(lines: list[bytes], half: bytes) -> None:
    import io

    from guard.telemetry import ledger_files

    data = b"".join(line + b"\n" for line in lines)
    half = half.replace(b"\n", b"")
    before = ledger_files.BLOCK_BYTES
    try:
        ledger_files.BLOCK_BYTES = 4
        found = list(placed_backwards(io.BytesIO(data + half)))  # type: ignore[arg-type]
    finally:
        ledger_files.BLOCK_BYTES = before
    assert [line for _, line in reversed(found)] == [*lines, *([half] if half else [])]
    assert all((data + half + b"\n")[at : at + len(line) + 1] == line + b"\n" for at, line in found)


@given(st.lists(st.binary(max_size=9).map(lambda one: one.replace(b"\n", b""))), st.binary(min_size=1, max_size=2))
def test_lines_with_a_text_are_found_wherever_blocks_are_cut(lines: list[bytes], text: bytes) -> None:
    import io

    from guard.telemetry import ledger_files

    assume(b"\n" not in text)
    before = ledger_files.SEARCHED_BYTES
    try:
        ledger_files.SEARCHED_BYTES = 5
        found = list(ledger_files.lines_with(io.BytesIO(b"\n".join(lines)), text))
    finally:
        ledger_files.SEARCHED_BYTES = before
    assert found == [line for line in reversed(lines) if text in line]


def kept(request_id: str, text: str) -> Captured:
    prompt = (PromptText(0, "user", text),)
    return Captured(request_id, "2026-11-30", "p", prompt, (AnswerText(0, "words", "yes \ud800"),), {}, False, DAY)


DAY = date(2026, 12, 7)


def write_captured(ledger: Path, request_id: str, line: bytes, sha256: str) -> None:
    content_folder(ledger).mkdir(exist_ok=True)
    with file_of(content_folder(ledger), DAY).open("ab") as file:
        file.write(line)
    with ledger.open("a") as entries_file:
        fields = {"request_id": request_id, "captured": {"expires": DAY.isoformat(), "sha256": sha256}}
        entries_file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def test_captured_text_is_found_by_its_request_and_is_gone_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for name in ("a", "b"):
        line = kept(name, f"words of {name}").to_line()
        write_captured(path, name, line, digest(line))
    found = captured(path, "b")
    assert found == kept("b", "words of b")
    file_of(content_folder(path), DAY).unlink()
    assert captured(path, "b") is None
    path.write_text(entry(1))
    assert captured(path, "r-1") is None
    assert captured(path, "unknown") is None


def test_text_that_was_changed_afterwards_is_not_intact(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    line = kept("a", "pay 10").to_line()
    write_captured(path, "a", line.replace(b"pay 10", b"pay 99"), digest(line))
    found = captured(path, "a")
    assert found is not None
    assert not found.intact
    assert found.prompt[0].text == "pay 99"
