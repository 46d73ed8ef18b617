"""The ledger loses nothing while its disk works, and costs no request when it does not."""

from __future__ import annotations

import json
import logging
import os
import resource
import stat
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from guard.telemetry import ledger as ledger_module
from guard.telemetry.ledger import Ledger, LedgerError
from guard.telemetry.ledger_check import check


class Results(Counter[str]):
    def __call__(self, result: str, entries: int) -> None:
        self[result] += entries


def lines(path: Path) -> list[dict[str, object]]:
    """Entries without their places in the chain."""
    return [without_chain(line) for line in path.read_text().splitlines()]


def without_chain(line: str) -> dict[str, object]:
    entry: dict[str, object] = json.loads(line)
    del entry["chain"]
    return entry


def test_entries_of_many_threads_are_all_there_each_on_a_line_of_its_own(tmp_path: Path) -> None:
    results = Results()
    with Ledger(tmp_path / "new" / "ledger.jsonl", results) as ledger:

        def append(writer: int) -> None:
            for number in range(500):
                ledger.append({"writer": writer, "number": number, "text": "line\nbreak é"})

        threads = [threading.Thread(target=append, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    written = lines(tmp_path / "new" / "ledger.jsonl")
    assert {(entry["writer"], entry["number"]) for entry in written} == {(w, n) for w in range(4) for n in range(500)}
    assert len(written) == results["written"] == 2000


def test_an_entry_is_in_the_file_soon_not_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append({"a": 1})
        deadline_s = time.monotonic() + 5
        while not path.read_text() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert lines(path) == [{"a": 1}]


def test_what_is_there_is_kept_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for number in range(3):
        with Ledger(path) as ledger:
            ledger.append({"run": number})
    assert lines(path) == [{"run": 0}, {"run": 1}, {"run": 2}]


def test_others_on_the_machine_cannot_read_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path):
        assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRWXO == 0


def test_a_file_that_cannot_be_opened_stops_the_start_and_the_message_names_it(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=rf"{tmp_path} cannot be written: Is a directory.*--ledger"):
        Ledger(tmp_path).__enter__()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_counted_and_logged_once_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    results = Results()
    with caplog.at_level(logging.ERROR), Ledger(Path("/dev/full"), results) as ledger:
        for number in range(50):
            ledger.append({"number": number})
            time.sleep(0.001)
    assert (results["failed"], results["written"], results["dropped"]) == (50, 0, 0)
    assert 1 <= results["delayed"] <= 50
    assert [record.name for record in caplog.records] == ["guard.ledger"]
    assert "No space left on device" in caplog.text


def test_after_half_a_line_the_next_entry_begins_on_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, results = tmp_path / "ledger.jsonl", Results()
    real_write, calls = os.write, Counter[str]()

    def write(file: int, data: bytes) -> int:
        """The disk takes five bytes of the first entry, then is full once."""
        calls["write"] += 1
        if calls["write"] == 1:
            return real_write(file, data[:5])
        if calls["write"] == 2:
            raise OSError(28, "No space left on device")
        return real_write(file, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(ledger_module, "RETRY_S", 0.01)
    with Ledger(path, results) as ledger:
        ledger.append({"number": 1})
        while not results["delayed"]:
            time.sleep(0.001)
        ledger.append({"number": 2})
    assert [without_chain(line) for line in path.read_text().splitlines()[1:]] == [{"number": 1}, {"number": 2}]
    assert check(path).problems == []
    assert results == {"delayed": 1, "written": 2}


def test_a_disk_that_is_full_for_a_while_costs_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's own limit of a file's size stands for the disk's."""
    path, results = tmp_path / "ledger.jsonl", Results()
    monkeypatch.setattr(ledger_module, "RETRY_S", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(path, results) as ledger:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            for number in range(300):
                ledger.append({"number": number, "padding": "x" * 30})
            while not results["delayed"]:
                time.sleep(0.001)
            time.sleep(0.05)
            assert path.stat().st_size == 1000
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found, torn = [], 0
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line)["number"])
        except ValueError:
            torn += 1
    assert found == list(range(300))
    assert torn <= 1
    assert check(path).problems == []
    assert (results["written"], results["failed"], results["dropped"]) == (300, 0, 0)


def test_when_too_many_wait_new_entries_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_QUEUED", 10)
    writing, disk_hangs = threading.Event(), threading.Event()
    real_write = os.write

    def write(file: int, data: bytes) -> int:
        writing.set()
        disk_hangs.wait(10)
        return real_write(file, data)

    monkeypatch.setattr(os, "write", write)
    results = Results()
    with Ledger(tmp_path / "ledger.jsonl", results) as ledger:
        ledger.append({"number": 0})
        assert writing.wait(10)
        for number in range(1, 100):
            ledger.append({"number": number})
        disk_hangs.set()
    assert (results["written"], results["dropped"]) == (11, 89)
    assert [entry["number"] for entry in lines(tmp_path / "ledger.jsonl")] == list(range(11))
