"""The ledger loses nothing while its disk works, and costs no request when it does not."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from guard.cli import app
from guard.machine import free_port
from guard.telemetry import ledger as ledger_module
from guard.telemetry import ledger_check, ledger_file
from guard.telemetry.chain import Secret
from guard.telemetry.content import file_of
from guard.telemetry.ledger import Ledger, LedgerError, check_writable
from guard.telemetry.ledger_check import check
from guard.telemetry.ledger_file import Keeping, LedgerFile
from guard.telemetry.ledger_files import content_folder, head_path, rotated_files
from guard.telemetry.ledger_reader import LedgerReadError, entries


class Results(Counter[str]):
    def __call__(self, result: str, entries: int) -> None:
        self[result] += entries


class Waiting:
    """How many entries wait, and how many waited at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, more: int) -> None:
        with self._lock:
            self.now += more
            self.most = max(self.most, self.now)


def lines(path: Path) -> list[dict[str, object]]:
    """Entries without their places in the chain."""
    return [without_chain(line) for line in path.read_text().splitlines()]


def without_chain(line: str) -> dict[str, object]:
    entry: dict[str, object] = json.loads(line)
    del entry["chain"]
    return entry


def until(happens: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


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


def start(folder: Path) -> Result:
    """``guard proxy`` with a ledger in this folder, which at the latest ends for its keys."""
    keys = ["--keys", str(folder.with_name("no-keys.yaml"))]
    arguments = ["proxy", "--port", str(free_port()), "--ledger", str(folder / "ledger.jsonl"), *keys]
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, arguments)


def test_a_file_that_cannot_be_opened_stops_the_start_and_the_message_names_it(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=rf"{tmp_path} cannot be written: Is a directory.*--ledger"):
        Ledger(tmp_path).__enter__()


@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger-000000000017.jsonl"])
@pytest.mark.parametrize(
    "there", [b"Nov 30 12:00:00 host app: started\n", b'{"level":"info"}\n{"level":"warn"}\n', b"\x00\xff"]
)
def test_a_file_of_something_else_stops_the_first_start_and_stays_as_it_is(
    tmp_path: Path, name: str, there: bytes
) -> None:
    (tmp_path / name).write_bytes(there)
    ended = start(tmp_path)
    assert ended.exit_code == 1
    assert f"{tmp_path / name} is there already, and is no ledger" in ended.output
    assert "--ledger" in ended.output
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(name, there)]


@pytest.mark.parametrize("there", [None, b"", b"\n"])
@pytest.mark.parametrize("head", ["kept", "gone", "of another key"])
def test_a_ledger_goes_on_at_every_start_whatever_became_of_its_head(
    tmp_path: Path, there: bytes | None, head: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    if there is not None:
        path.write_bytes(there)
    keeping = Keeping(max_bytes=1)
    for number in range(3):
        check_writable(path)
        secret = Secret.of(f"a secret of start {number}") if head == "of another key" else None
        with Ledger(path, secret=secret, keeping=keeping) as ledger:
            ledger.append({"request_id": f"r-{number}"})
        with path.open("ab") as file:
            file.write(b'{"request_id":"half')
        if head == "gone":
            head_path(path).unlink()
    assert [entry["request_id"] for entry in entries(path) if entry is not None] == ["r-0", "r-1", "r-2"]


def test_entries_that_are_there_before_the_first_start_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"request_id":"r"}\n')
    check_writable(path)
    with Ledger(path) as ledger:
        ledger.append({"request_id": "s"})
    check_writable(path)
    assert [
        one.getMessage() for one in caplog.records if "begins with entries that are in no chain" in one.getMessage()
    ]
    assert len(caplog.records) == 1


def test_while_the_disk_refuses_entries_what_is_due_to_go_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expired texts and rotated files may be what the room is missing for."""
    path, refuses = tmp_path / "ledger.jsonl", threading.Event()
    writer = LedgerFile(path, None, Keeping(max_bytes=1))
    for number in range(3):
        assert writer.append([b'{"number":%d}' % number]) == (1, None)
    writer.close()
    assert len(rotated_files(path)) == 2
    expired = file_of(content_folder(path), date(2026, 1, 1))
    real_write = os.write

    def write(file: int, data: bytes) -> int:
        if refuses.is_set():
            raise OSError(28, "No space left on device")
        return real_write(file, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(ledger_module, "RETRY_S", 0.01)
    monkeypatch.setattr(ledger_module, "HOUSEKEEPING_REFUSED_S", 0.0)
    results, keeping = Results(), Keeping(files=0)
    with Ledger(path, results, keeping=keeping) as ledger:
        refuses.set()
        ledger.append({"number": 3})
        until(lambda: results["delayed"] == 1)
        content_folder(path).mkdir()
        expired.write_text("{}\n")
        until(lambda: not expired.exists() and not rotated_files(path))
        assert results["written"] == 0
        refuses.clear()
    assert (results["written"], results["failed"]) == (1, 0)
    assert lines(path)[-1] == {"number": 3}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_counted_and_logged_twice_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    results = Results()
    with caplog.at_level(logging.ERROR), Ledger(Path("/dev/full"), results) as ledger:
        for number in range(50):
            ledger.append({"number": number})
            time.sleep(0.001)
    assert (results["failed"], results["written"], results["dropped"]) == (50, 0, 0)
    assert 1 <= results["delayed"] <= 50
    first, last = caplog.messages
    assert "No space left on device" in first
    assert "50 entries are lost" in last


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
    # The second one waited too, unless the first one's time was over already.
    assert results == {"delayed": results["delayed"], "written": 2}
    assert results["delayed"] in (1, 2)


def test_every_entry_that_has_to_wait_counts_as_soon_as_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only those that are there when the disk is tried again."""
    refuses, real_write, results, waiting = threading.Event(), os.write, Results(), Waiting()

    def write(file: int, data: bytes) -> int:
        if refuses.is_set():
            raise OSError(28, "No space left on device")
        return real_write(file, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(ledger_module, "RETRY_S", 60)
    with Ledger(tmp_path / "ledger.jsonl", results, waiting) as ledger:
        refuses.set()
        ledger.append({"number": 0})
        until(lambda: results["delayed"] == 1)
        for number in range(1, 204):
            ledger.append({"number": number})
        assert waiting.now == results["delayed"] == ledger.delayed == 204
        refuses.clear()
    assert (results, waiting.now, ledger.delayed) == ({"written": 204, "delayed": 204}, 0, 0)


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
                if number == 100:
                    until(lambda: results["delayed"] > 0)
            # Every one that waits is told, once, whichever write it belongs to.
            until(lambda: results["delayed"] + results["written"] == 300)
            time.sleep(0.05)
            assert path.stat().st_size == 1000
            assert results["delayed"] == 300 - results["written"]
            delayed = results["delayed"]
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
    assert results == {"written": 300, "delayed": delayed}


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
    results, waiting = Results(), Waiting()
    with Ledger(tmp_path / "ledger.jsonl", results, waiting) as ledger:
        ledger.append({"number": 0})
        assert writing.wait(10)
        for number in range(1, 100):
            ledger.append({"number": number})
        assert waiting.now == 11
        disk_hangs.set()
    assert (results["written"], results["dropped"]) == (11, 89)
    assert (waiting.now, waiting.most) == (0, 11), "one that is dropped never waits"
    assert [entry["number"] for entry in lines(tmp_path / "ledger.jsonl")] == list(range(11))


def test_what_is_lost_at_the_end_is_counted_and_told_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than one write's entries, of which only the first few are ever tried."""
    monkeypatch.setattr(ledger_module, "MAX_BATCH", 5)
    path, results, waiting = tmp_path / "ledger.jsonl", Results(), Waiting()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with caplog.at_level(logging.ERROR), Ledger(path, results, waiting) as ledger:
            ledger.append({"number": 0})
            until(lambda: results["written"] == 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
            for number in range(208):
                ledger.append({"number": number})
            until(lambda: results["delayed"] == 208)
            assert waiting.now == 208
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert results == {"written": 1, "delayed": 208, "failed": 208}
    assert waiting.now == 0
    assert "208 entries are lost" in caplog.messages[-1]


def test_a_lock_that_somebody_keeps_delays_entries_like_a_disk_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger_file, "LOCK_WAIT_S", 0.05)
    monkeypatch.setattr(ledger_check, "LOCK_WAIT_S", 0.05)
    monkeypatch.setattr(ledger_module, "RETRY_S", 0.01)
    path, results = tmp_path / "ledger.jsonl", Results()
    with caplog.at_level(logging.ERROR), Ledger(path, results) as ledger:
        ledger.append({"number": 0})
        until(lambda: results["written"] == 1)
        assert stat.S_IMODE(head_path(path).stat().st_mode) == 0o600
        with head_path(path).open("rb") as head:
            fcntl.flock(head, fcntl.LOCK_SH)
            ledger.append({"number": 1})
            until(lambda: results["delayed"] == 1)
            fcntl.flock(head, fcntl.LOCK_EX)
            with pytest.raises(LedgerReadError, match=r"another process has held the lock on ledger\.jsonl\.head"):
                check(path)
        until(lambda: results["written"] == 2)
        # Kept to the end: the ledger is closed all the same.
        held = head_path(path).open("rb")
        fcntl.flock(held, fcntl.LOCK_EX)
        ledger.append({"number": 2})
        ledger.append({"number": 3})
    held.close()
    assert results == {"written": 2, "delayed": results["delayed"], "failed": 2}
    assert "another process has held the lock" in caplog.text
    assert "2 entries are lost" in caplog.messages[-1]
    assert check(path).problems == []


def test_a_head_that_others_could_open_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path):
        head_path(path).chmod(0o640)
    with Ledger(path):
        assert stat.S_IMODE(head_path(path).stat().st_mode) == 0o600
