"""Whatever is done to a ledger's lines shows, and whatever a crash leaves is read on from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from guard.telemetry.chain import Secret
from guard.telemetry.ledger_check import Anchor, Checked, check
from guard.telemetry.ledger_file import Keeping, LedgerFile
from guard.telemetry.ledger_files import head_path, ledger_files, rotated_files
from guard.telemetry.ledger_reader import LedgerReadError, entries, recent

SECRET = Secret.of("correct horse")
SECRETS = st.sampled_from((None, SECRET))
SMALL = Keeping(max_bytes=700)
"""A new file about every five entries."""


@contextmanager
def folder() -> Iterator[Path]:
    """For property tests, whose examples each need one."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made) / "ledger.jsonl"


def entry(number: int) -> bytes:
    return json.dumps({"request_id": f"r-{number}", "number": number}, separators=(",", ":")).encode()


def write(path: Path, numbers: range, secret: Secret | None = None, keeping: Keeping | None = None) -> None:
    """Each in a batch of its own."""
    file = LedgerFile(path, secret, keeping)
    for number in numbers:
        assert file.append([entry(number)]) == (1, None)
    file.close()


def numbers(path: Path) -> list[int]:
    return [one["number"] for one in entries(path) if one is not None]


def found(path: Path, secret: Secret | None = None) -> str:
    return "\n".join(map(str, check(path, secret).problems))


@given(SECRETS, st.sampled_from((None, SMALL)), st.lists(st.integers(1, 4), min_size=1, max_size=8))
@settings(deadline=None, max_examples=40)
def test_a_ledger_that_nobody_touched_has_no_problem(
    secret: Secret | None, keeping: Keeping | None, batches: list[int]
) -> None:
    """Across batches, restarts and rotation."""
    with folder() as path:
        written = 0
        for batch in batches:
            file = LedgerFile(path, secret, keeping)
            assert file.append([entry(written + i) for i in range(batch)]) == (batch, None)
            file.close()
            written += batch
        checked = check(path, secret)
        assert (checked.problems, checked.notes) == ([], [])
        assert (checked.entries, checked.first, checked.last and checked.last.n) == (written, 1, written)
        assert checked.keyed == (written if secret else 0)
        assert numbers(path) == list(range(written))


def make_lines(path: Path, secret: Secret | None, *, rotated: bool) -> list[tuple[Path, int]]:
    """Twelve entries; where each line is."""
    write(path, range(12), secret, SMALL if rotated else None)
    return [(file, i) for file in ledger_files(path) for i in range(len(file.read_bytes().splitlines()))]


CHANGES = ("remove", "edit", "delete a byte", "swap", "copy", "insert", "cut", "unlink")


@given(st.data(), SECRETS, st.booleans())
@settings(deadline=None, max_examples=150)
def test_any_removal_edit_swap_copy_or_addition_is_found(
    data: st.DataObject, secret: Secret | None, rotated: bool
) -> None:
    with folder() as path:
        places = make_lines(path, secret, rotated=rotated)
        before = {file: file.read_bytes() for file in ledger_files(path)}
        file, at = data.draw(st.sampled_from(places))
        lines = before[file].splitlines(keepends=True)
        what = data.draw(
            st.sampled_from(("remove", "edit", "delete a byte", "swap", "copy", "insert", "cut", "unlink"))
        )
        if what == "remove":
            del lines[at]
        elif what == "edit":
            byte = data.draw(st.integers(0, len(lines[at]) - 1))
            other = data.draw(st.integers(0, 255).filter(lambda one: one != lines[at][byte]))
            lines[at] = lines[at][:byte] + bytes([other]) + lines[at][byte + 1 :]
        elif what == "delete a byte":
            byte = data.draw(st.integers(0, len(lines[at]) - 1))
            lines[at] = lines[at][:byte] + lines[at][byte + 1 :]
        elif what == "swap":
            other_file, other_at = data.draw(st.sampled_from([one for one in places if one != (file, at)]))
            others = lines if other_file == file else before[other_file].splitlines(keepends=True)
            lines[at], others[other_at] = others[other_at], lines[at]
            other_file.write_bytes(b"".join(others))
        elif what == "copy":
            lines.insert(data.draw(st.integers(0, len(lines))), lines[at])
        elif what == "insert":
            lines.insert(at, data.draw(st.sampled_from((b"{}\n", b"\n", entry(77) + b"\n"))))
        elif what == "cut":
            whole = b"".join(lines)
            lines = [whole[: data.draw(st.integers(0, len(whole) - 2))]]
        file.write_bytes(b"".join(lines))
        # The last line without its end says the same.
        assume(b"".join(lines).rstrip(b"\n") != before[file].rstrip(b"\n") or what not in ("delete a byte", "cut"))
        if what == "unlink":
            file.unlink()
        assert problems_or_error(path, secret), what


def problems_or_error(path: Path, secret: Secret | None) -> str:
    """An error when nothing is left, or an edit made a line say that it is keyed."""
    try:
        return found(path, secret)
    except LedgerReadError as error:
        return str(error)


@given(st.data(), SECRETS)
@settings(deadline=None, max_examples=60)
def test_after_a_crash_at_any_byte_the_chain_goes_on_and_every_whole_entry_is_read(
    data: st.DataObject, secret: Secret | None
) -> None:
    """The machine stops while a batch is written: some of its bytes are there, the head says nothing of them yet, or
    was lost itself in the power cut."""
    with folder() as path:
        write(path, range(data.draw(st.integers(0, 3))), secret)
        before = path.read_bytes() if path.exists() else b""
        head = head_path(path).read_bytes() if path.exists() else b""
        LedgerFile(path, secret).append([entry(100 + i) for i in range(3)])
        batch = path.read_bytes()[len(before) :]
        part = batch[: data.draw(st.integers(0, len(batch)))]
        path.write_bytes(before + part)
        if head:
            head_path(path).write_bytes(head)
        else:
            head_path(path).unlink()
        whole = numbers(path)
        assert len(whole) == (before + part).count(b"}}")
        write(path, range(200, 203), secret)
        assert numbers(path) == [*whole, 200, 201, 202]
        checked = check(path, secret)
        # Without the head nobody can know that the crash took no more.
        assert [one for one in checked.problems if "the head file was gone" not in one.what] == []
        assert not (head and checked.problems)


def test_the_problem_names_file_line_and_entry(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(20), None, SMALL)
    second = rotated_files(path)[1]
    lines = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(b"".join([lines[0], lines[1].replace(b'"number":', b'"number": '), *lines[2:]]))
    (problem,) = check(path).problems
    n = json.loads(lines[1])["chain"]["n"]
    assert (problem.file, problem.line, problem.entry) == (second.name, 2, n)
    second.write_bytes(b"".join([lines[0], *lines[2:]]))
    assert found(path) == f"{second.name}:2: entry {n} is missing before this line"


def test_entries_cut_off_at_the_end_show_against_the_head_and_for_ever_after_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(5))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert "entries 4 to 5 are missing at the end: the head file says that there were 5" in found(path)
    write(path, range(5, 7))
    assert "ledger.jsonl:4: entries 4 to 5 are missing before this line" in found(path)
    assert check(path, since=6).problems == []


@pytest.mark.parametrize("secret", [None, SECRET])
def test_when_every_file_but_the_head_is_gone_the_head_says_which_entries_are_missing(
    tmp_path: Path, secret: Secret | None
) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(12), secret, SMALL)
    for file in ledger_files(path):
        file.unlink()
    assert "entries 1 to 12 are missing at the end: the head file says that there were 12" in found(path, secret)
    write(path, range(12, 13), secret, SMALL)
    assert "entries 1 to 12 are missing at the beginning" in found(path, secret)


def test_a_head_that_is_gone_is_told_and_so_is_that_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(3))
    head_path(path).unlink()
    assert "ledger.jsonl.head: is gone" in found(path)
    write(path, range(3, 5))
    assert "entry 4: the head file was gone by then" in found(path)
    assert check(path, since=4).problems == []


def test_a_key_that_comes_later_counts_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(3))
    write(path, range(3, 6), SECRET)
    assert "entry 1 is not keyed" in found(path, SECRET)
    assert check(path, SECRET, since=4).problems == []
    path.write_bytes(path.read_bytes().replace(b'"number":4', b'"number":9'))
    assert [one.entry for one in check(path, SECRET, since=4).problems] == [5]


def test_without_a_secret_whoever_can_write_can_forge_and_with_one_not(tmp_path: Path) -> None:
    """What an unkeyed chain does not prove."""
    plain, keyed, forged = (tmp_path / name / "ledger.jsonl" for name in ("plain", "keyed", "forged"))
    for path, secret in ((plain, None), (keyed, SECRET)):
        path.parent.mkdir()
        write(path, range(3), secret)
    forged.parent.mkdir()
    write(forged, range(50, 53))
    for path in (plain, keyed):
        shutil.copy(forged, path)
        head = json.loads(head_path(forged).read_bytes())
        inner = json.loads(head["head"]) | {"file": path.stat().st_ino}
        head_path(path).write_text(json.dumps({**head, "head": json.dumps(inner)}))
    assert check(plain).problems == []
    assert "entry 1 is not keyed" in found(keyed, SECRET)
    # What was noted elsewhere shows it in both.
    assert check(plain, anchors=[Anchor(2, "0" * 64)]).problems[0].what == "entry 2 has another hash than was noted"
    assert check(plain, anchors=[Anchor(9, "0" * 64)]).problems[0].what == "has no entry 9, which was noted"


def test_another_secret_than_the_writers_is_told_and_none_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(2), SECRET)
    assert "2 entries, up to 2, are keyed with another secret" in found(path, Secret.of("another"))
    with pytest.raises(LedgerReadError, match=r"ledger\.jsonl:1: is keyed; the secret is needed"):
        check(path)
    assert b"correct horse" not in path.read_bytes() + head_path(path).read_bytes()


def test_lines_of_an_older_version_are_vouched_for_by_the_first_entry(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(entry(0) + b"\n" + entry(1) + b"\n")
    write(path, range(2, 4))
    checked = check(path)
    assert checked.problems == []
    assert [str(note) for note in checked.notes] == [
        "ledger.jsonl:1: lines 1 to 2: no entry, vouched for by the next: of a crash, a full disk or an older version"
    ]
    assert numbers(path) == [0, 1, 2, 3]
    path.write_bytes(path.read_bytes().replace(b'"number":0', b'"number":7'))
    assert "ledger.jsonl:3: entry 1 is not what was written" in found(path)


FORGED = (
    entry(77) + b"\n",
    entry(77) + b"\n" + entry(78) + b"\n",
    b'{"a":1}\n',
    b"no json\n",
    entry(77),
    entry(77)[:-1] + b',"chain":{"n":4,"key":"%s","hash":"%s"}}\n' % (SECRET.name.encode(), b"0" * 64),
    entry(77)[:-1] + b',"chain":{"n":4,"hash":"%s"}}\n' % (b"0" * 64),
    entry(77)[:-1] + b',"chain":{"n":999999999999999999,"hash":"%s"}}\n' % (b"0" * 64),
    entry(77)[:-1] + b',"chain":{"n":2,"key":"%s","hash":"%s"}}\n' % (SECRET.name.encode(), b"0" * 64),
)


@pytest.mark.parametrize("forged", FORGED)
def test_no_later_entry_vouches_for_a_whole_line_that_somebody_put_at_the_end(tmp_path: Path, forged: bytes) -> None:
    """Nor is it counted, unless it has an invented place in the chain, which only the key can tell."""
    path = tmp_path / "ledger.jsonl"
    write(path, range(3), SECRET)
    with path.open("ab") as file:
        file.write(forged)
    assert check(path, SECRET).problems
    for later in (range(3, 4), range(4, 6)):
        write(path, later, SECRET)
        assert check(path, SECRET).problems
    assert [one for one in numbers(path) if one != 77] == list(range(6))
    assert (77 in numbers(path)) == (b'"chain"' in forged)


def test_half_lines_of_several_tries_are_a_note_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(3), SECRET)
    with path.open("ab") as file:
        file.write(entry(3)[:9] + b"\n" + entry(3)[:-1])
    write(path, range(3, 5), SECRET)
    checked = check(path, SECRET)
    assert (checked.problems, len(checked.notes)) == ([], 1)
    assert numbers(path) == list(range(5))


def test_what_retention_deletes_is_no_gap_and_what_somebody_deletes_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(30), None, Keeping(max_bytes=700, files=2))
    assert len(rotated_files(path)) == 2
    checked = check(path)
    assert checked.problems == []
    assert checked.first > 1
    rotated_files(path)[0].unlink()
    assert "missing at the beginning, which retention has not deleted" in found(path)


def test_files_are_kept_for_as_long_as_was_said(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(12), None, SMALL)
    old, *_ = rotated_files(path)
    os.utime(old, (time.time() - 100, time.time() - 100))
    LedgerFile(path, None, Keeping(age_s=50)).keep_house()
    assert not old.exists()
    assert check(path).problems == []
    # By age alone too, without a new entry.
    before = path.read_bytes()
    LedgerFile(path, None, Keeping(max_age_s=0)).keep_house()
    assert rotated_files(path)[-1].read_bytes() == before
    assert path.read_bytes() == b""
    write(path, range(12, 14))
    assert check(path).problems == []


WRITER = """
import json, sys
from pathlib import Path
from guard.telemetry.chain import Secret
from guard.telemetry.ledger_file import Keeping, LedgerFile
name, count, batch = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
file = LedgerFile(Path(sys.argv[1]), Secret.of("s"), Keeping(max_bytes=20_000))
print("ready", flush=True)
for start in range(0, count, batch):
    lines = [json.dumps({"request_id": name, "number": n, "x": "y" * 50}).encode() for n in range(start, start + batch)]
    while lines:
        whole, error = file.append(lines)
        assert error is None, error
        lines = lines[whole:]
print("done", flush=True)
"""


def writer(path: Path, name: str, count: int, batch: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(count), str(batch)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_writers_in_several_processes_make_one_chain_across_rotation(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    processes = [writer(path, name, 300, 3) for name in "abc"]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert output.endswith("done\n")
    assert check(path, Secret.of("s")).problems == []
    written = [(one["request_id"], one["number"]) for one in entries(path) if one is not None]
    assert sorted(written) == [(name, n) for name in "abc" for n in range(300)]
    assert len(rotated_files(path)) > 3


def test_writers_killed_in_the_middle_leave_a_chain_that_goes_on(tmp_path: Path) -> None:
    """kill -9, again and again, beside one that goes on."""
    path, secret = tmp_path / "ledger.jsonl", Secret.of("s")
    steady = writer(path, "steady", 1500, 1)
    for round_ in range(4):
        killed = writer(path, f"killed-{round_}", 10_000_000, 20)
        assert killed.stdout is not None
        assert killed.stdout.readline() == "ready\n"
        time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        killed.stdout.close()
    output, _ = steady.communicate(timeout=60)
    assert output.endswith("done\n")
    write(path, range(1), secret)
    checked: Checked = check(path, secret)
    assert checked.problems == []
    assert checked.entries == len(numbers(path))
    assert [one["number"] for one in entries(path) if one and one["request_id"] == "steady"] == list(range(1500))
    assert recent(path, 1)[0]["request_id"] == "r-0"
