"""The commands ``guard ledger``, as an operator and a CI job call them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from detectors.base import Score
from guard.cli import app
from guard.policy.recorded import find_request
from guard.telemetry.chain import Secret
from guard.telemetry.content import Captured, PromptText, file_of, keep
from guard.telemetry.ledger_file import Keeping, LedgerFile
from guard.telemetry.ledger_files import content_folder, ledger_files, rotated_files
from guard.telemetry.ledger_reader import LedgerReadError
from tests.telemetry.records import blocked, record

runner = CliRunner()
SECRET = "a secret of the operator's"  # noqa: S105


def ledger(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = runner.invoke(app, ["ledger", *arguments], env={"GUARD_LEDGER_KEY": "", **environment})
    return done.exit_code, done.stdout, done.stderr


def write(path: Path, entries: list[dict[str, Any]], secret: str | None = None, max_bytes: int = 4096) -> None:
    file = LedgerFile(path, Secret.of(secret) if secret else None, Keeping(max_bytes=max_bytes))
    for one in entries:
        assert file.append([json.dumps(one, separators=(",", ":")).encode()]) == (1, None)
    file.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Twelve requests in several files, of which every third was blocked."""
    path = tmp_path / "ledger.jsonl"
    made = []
    for i in range(12):
        one = blocked() if i % 3 == 0 else record(outcome="completed", status=200, model="smollm2-135m")
        one.request_id, one.scores = f"r-{i}", {"injection": Score("scored", i / 12)}
        made.append({**one.to_entry(), "time": f"2026-11-{10 + i}T12:00:00.000+00:00"})
    write(path, made)
    assert len(rotated_files(path)) > 1
    return path


def test_output_that_is_cut_off_is_no_finding(tmp_path: Path) -> None:
    """The status of what is piped into ``head``: that of a program that was stopped, and none of the guard's own."""
    write(tmp_path / "ledger.jsonl", [record().to_entry()] * 300, max_bytes=10**9)
    command = [sys.executable, "-m", "guard", "ledger", "query", "--limit", "300", "--ledger"]
    with subprocess.Popen(
        [*command, str(tmp_path / "ledger.jsonl"), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as cut:
        assert cut.stdout is not None
        assert cut.stderr is not None
        assert cut.stdout.readline()
        cut.stdout.close()
        assert (cut.wait(60), cut.stderr.read()) == (-signal.SIGPIPE, b"")


def test_an_entry_that_was_copied_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, [record().to_entry()] * 3, secret=SECRET, max_bytes=10**9)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[0]]))
    _, out, _ = ledger("verify", "--ledger", str(path), "--json", GUARD_LEDGER_KEY=SECRET)
    assert (found := json.loads(out))["entries"] == found["keyed"]


def test_scores_of_an_answer_are_found_and_counted_with_those_of_answers_before_it(tmp_path: Path) -> None:
    def entry(name: str, **answer: Any) -> dict[str, Any]:
        one = record(outcome="completed", status=200)
        one.request_id = name
        return {**one.to_entry(), "answer": {"scores": {"made": 0.2}, "detectors": {"made": "scored"}, **answer}}

    path = tmp_path / "ledger.jsonl"
    lost = {"scores": {"made": None}, "detectors": {"made": "unavailable: behind"}}
    times = {"over_time": {"made": {"lowest": 0.1, "highest": 0.7, "without": ["unavailable: behind"]}}}
    earlier = {"earlier": [{"scores": {"made": 0.8}}]}
    write(path, [entry("low"), entry("lost", **lost, **times), entry("again", **earlier)])
    for least, found in (("0.1", ["again", "lost", "low"]), ("0.6", ["again", "lost"]), ("0.75", ["again"])):
        assert ids(ledger("query", "--ledger", str(path), "--score", f"made={least}", "--json")[1]) == found
    told = json.loads(ledger("stats", "--ledger", str(path), "--json")[1])
    assert told["detectors"]["made"] == {"scored": 2, "unavailable": 1}


def ids(output: str) -> list[str]:
    return [json.loads(line)["request_id"] for line in output.splitlines()]


def test_tail_shows_the_latest_requests_the_latest_last(path: Path) -> None:
    code, out, _ = ledger("tail", "--ledger", str(path), "-n", "8", "--json")
    assert (code, ids(out)) == (0, [f"r-{i}" for i in range(4, 12)])
    code, out, _ = ledger("tail", "--ledger", str(path), "-n", "3")
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()] == ["r-9", "r-10", "r-11"]
    assert "block   injection" in out.splitlines()[0]


def test_tail_goes_on_with_what_comes_across_rotation(path: Path) -> None:
    command = [sys.executable, "-m", "guard", "ledger", "tail", "--ledger", str(path), "-n", "1", "-f", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(60, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        lines: Iterator[str] = iter(process.stdout.readline, "")
        assert ids(next(lines)) == ["r-11"]
        before = len(rotated_files(path))
        write(path, [{**record().to_entry(), "request_id": f"n-{i}"} for i in range(12)])
        assert len(rotated_files(path)) > before
        assert [ids(next(lines))[0] for _ in range(12)] == [f"n-{i}" for i in range(12)]
    finally:
        limit.cancel()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("--action", "block"), [9, 6, 3, 0]),
        (("--rule", "injection", "--limit", "2"), [9, 6]),
        (("--rule", "distracted"), [9, 6, 3, 0]),
        (("--action", "none", "--outcome", "completed", "--since", "2026-11-18"), [11, 10, 8]),
        (("--until", "2026-11-11T12:00:00"), [1, 0]),
        (("--score", "injection=0.75"), [11, 10, 9]),
        (("--policy", "default", "--model", "smollm2-135m", "--route", "/v1/chat/completions", "--limit", "1"), [11]),
        (("--request", "r-5"), [5]),
    ],
)
def test_query_shows_what_fits_the_newest_first(path: Path, asked: tuple[str, ...], expected: list[int]) -> None:
    code, out, err = ledger("query", "--ledger", str(path), "--json", *asked)
    assert (code, ids(out), err) == (0, [f"r-{i}" for i in expected], "")


def test_query_without_a_hit_exits_with_one_and_with_nonsense_with_two(path: Path) -> None:
    assert ledger("query", "--ledger", str(path), "--tenant", "nobody")[0] == 1
    assert ledger("query", "--ledger", str(path), "--request", "r-5", "--action", "block")[0] == 1
    code, _, err = ledger("query", "--ledger", str(path), "--score", "injection")
    assert (code, err) == (2, "guard: --score injection: is DETECTOR=NUMBER, and the number a finite one\n")


def test_show_prints_one_request_and_says_when_no_text_was_kept(path: Path) -> None:
    code, out, _ = ledger("show", "r-3", "--ledger", str(path), "--content")
    assert code == 0
    told = json.loads(out)
    assert (told["entry"]["action"], told["content"]) == ("block", None)
    assert ledger("show", "r-99", "--ledger", str(path))[0] == 2


def test_an_id_that_a_client_sent_hides_nothing_and_is_told_as_the_clients(path: Path) -> None:
    """The same for the one who asks by it: every request that has it comes."""
    sent = [{**record(client_request_id=id_).to_entry(), "request_id": name} for name, id_ in OF_CLIENTS]
    write(path, sent)
    code, out, err = ledger("show", "r-3", "--ledger", str(path), "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (json.loads(out)["entry"]["request_id"], "found_by" in json.loads(out)) == ("r-3", False)
    code, out, _ = ledger("query", "--request", "r-3", "--ledger", str(path), "--json")
    assert (code, ids(out)) == (0, ["r-3", "x-1", "x-0"])
    assert [json.loads(line).get("found_by") for line in out.splitlines()] == [None, *["client_request_id"] * 2]
    lines = ledger("query", "--request", "r-3", "--ledger", str(path))[1].splitlines()
    assert [line.endswith("(by the client's id)") for line in lines] == [False, True, True]
    code, out, err = ledger("show", "mine", "--ledger", str(path), "--json")
    shown = [json.loads(line) for line in out.splitlines()]
    assert [one["entry"]["request_id"] for one in shown] == ["x-3", "x-2"]
    assert {one["found_by"] for one in shown} == {"client_request_id"}
    assert err == "guard: no request has the id 'mine' from the guard; 2 have it from their clients\n"
    with pytest.raises(LedgerReadError, match=r"2 requests have 'mine' from their clients; name one .*: x-3, x-2"):
        find_request(path, "mine")


OF_CLIENTS = (("x-0", "r-3"), ("x-1", "r-3"), ("x-2", "mine"), ("x-3", "mine"))


def test_stats_count_all_files(path: Path) -> None:
    code, out, _ = ledger("stats", "--ledger", str(path), "--json")
    told = json.loads(out)
    assert (code, told["requests"], told["action"], told["rules"]) == (0, 12, {"none": 8, "block": 4}, {"injection": 4})
    assert told["detectors"]["injection"] == {"scored": 12}
    assert told["times_ms"]["total"] == {"p50": 32.1, "p95": 32.1, "p99": 32.1, "max": 32.1}
    assert (told["first_time"], told["last_time"]) == ("2026-11-10T12:00:00.000+00:00", "2026-11-21T12:00:00.000+00:00")
    code, out, _ = ledger("stats", "--ledger", str(path), "--since", "2026-11-20")
    assert out.startswith("2 requests, 2026-11-20T12:00:00.000+00:00 to 2026-11-21")


def test_stats_leave_out_what_somebody_put_there_and_tell_how_many(path: Path) -> None:
    forged = json.dumps({**record().to_entry(), "request_id": "forged", "time": "2026-11-22T12:00:00.000+00:00"})
    with path.open("a") as file:
        file.write(forged + "\n")
    write(path, [{**record().to_entry(), "request_id": "later"}])
    for since in ((), ("--since", "2026-11-01")):
        told = json.loads(ledger("stats", "--ledger", str(path), "--json", *since)[1])
        assert (told["requests"], told["other_lines"]) == (13, 1)
    assert "1 lines are no entries, or not in the chain: left out" in ledger("stats", "--ledger", str(path))[1]
    code, out, _ = ledger("verify", "--ledger", str(path))
    assert (code, "no half line either" in out) == (1, True)


def test_verify_exits_with_zero_and_prints_the_anchor_that_it_later_takes(path: Path) -> None:
    code, out, _ = ledger("verify", "--ledger", str(path))
    assert code == 0
    assert out.startswith("the chain holds: 12 entries in ")
    anchor = out.split()[-1]
    assert ledger("verify", "--ledger", str(path), "--anchor", anchor)[0] == 0
    code, out, _ = ledger("verify", "--ledger", str(path), "--anchor", f"12:{'0' * 64}")
    assert (code, out.splitlines()[0].partition(": ")[2]) == (1, "entry 12 has another hash than was noted")
    assert ledger("verify", "--ledger", str(path), "--anchor", "12")[0] == 2


def test_verify_names_file_line_and_what_is_wrong_and_exits_with_one(path: Path) -> None:
    file = rotated_files(path)[1]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0].replace('"smollm2', '"Smollm2'), *lines[1:]]))
    n = json.loads(lines[0])["chain"]["n"]
    code, out, _ = ledger("verify", "--ledger", str(path))
    assert code == 1
    assert out.splitlines()[0] == (
        f"{file.name}:1: entry {n} is not what was written, or what is before it: its hash does not fit"
    )
    code, out, _ = ledger("verify", "--ledger", str(path), "--json")
    told = json.loads(out)
    assert (code, told["holds"], told["problems"][0]["file"], told["problems"][0]["line"]) == (1, False, file.name, 1)
    assert ledger("verify", "--ledger", str(path), "--since", str(n + 1))[0] == 0


def test_verify_takes_the_secret_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path, key = tmp_path / "ledger.jsonl", tmp_path / "key"
    write(path, [record().to_entry()], SECRET)
    key.write_text(SECRET + "\n")
    assert ledger("verify", "--ledger", str(path), "--key-file", str(key))[0] == 0
    assert ledger("verify", "--ledger", str(path), GUARD_LEDGER_KEY=SECRET)[0] == 0
    assert ledger("verify", "--ledger", str(path), GUARD_LEDGER_KEY="another secret of the operator's")[0] == 1
    code, _, err = ledger("verify", "--ledger", str(path), GUARD_LEDGER_KEY="short")
    assert (code, "GUARD_LEDGER_KEY: is shorter than 16 characters" in err) == (2, True)
    key.write_text("short\n")
    assert ledger("verify", "--ledger", str(path), "--key-file", str(key))[0] == 2
    code, _, err = ledger("verify", "--ledger", str(path))
    assert (code, err) == (2, "guard: ledger.jsonl:1: is keyed; the secret is needed to check it\n")


def test_with_a_wrong_key_verify_says_so_once_and_not_for_every_entry(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, [record().to_entry()] * 9, SECRET, max_bytes=1 << 20)
    code, out, _ = ledger("verify", "--ledger", str(path), GUARD_LEDGER_KEY="another secret of the operator's")
    assert (code, len(out.splitlines())) == (1, 3)
    assert "9 entries, up to 9, are keyed with another secret" in out


@pytest.mark.parametrize("command", [("tail",), ("query",), ("show", "r"), ("verify",), ("stats",)])
def test_a_ledger_that_is_not_there_is_exit_code_two(tmp_path: Path, command: tuple[str, ...]) -> None:
    code, _, err = ledger(*command, "--ledger", str(tmp_path / "none.jsonl"))
    assert (code, err) == (2, f"guard: {tmp_path / 'none.jsonl'}: cannot be read: No such file or directory\n")


def test_query_refuses_what_no_request_can_have_and_tells_of_a_detector_that_gave_no_score(path: Path) -> None:
    code, _, err = ledger("query", "--ledger", str(path), "--action", "blok")
    assert (code, err) == (
        2,
        "guard: --action blok: has to be one of none, allow, flag, redact, steer, retry, route, block\n",
    )
    assert ledger("query", "--ledger", str(path), "--outcome", "complete")[0] == 2
    code, _, err = ledger("query", "--ledger", str(path), "--score", "injektion=0.5")
    assert (code, err) == (
        1,
        "guard: --score injektion: no request has a score of that name; there are injection\n",
    )
    assert ledger("query", "--ledger", str(path), "--score", "injection=2")[::2] == (1, "")
    assert ids(ledger("query", "--ledger", str(path), "-n", "2", "--json")[1]) == ["r-11", "r-10"]


@pytest.mark.parametrize("chain", [None, {"n": 13}, {"n": 13, "hash": "no"}])
def test_a_line_that_somebody_put_there_without_a_place_in_the_chain_is_marked(
    path: Path, chain: dict[str, Any] | None
) -> None:
    forged = {**record().to_entry(), "request_id": "forged", **({"chain": chain} if chain else {})}
    with path.open("a") as file:
        file.write(json.dumps(forged, separators=(",", ":")) + "\n")
    lines = ledger("tail", "--ledger", str(path), "-n", "2")[1].splitlines()
    assert [line.endswith("(not in the chain)") for line in lines] == [False, True]
    assert "not in the chain" in json.loads(ledger("show", "forged", "--ledger", str(path))[1])["warning"]
    assert "warning" not in json.loads(ledger("show", "r-11", "--ledger", str(path))[1])


def test_verify_names_captured_text_that_was_changed_and_notes_what_is_gone(tmp_path: Path) -> None:
    path, expires = tmp_path / "ledger.jsonl", datetime.now(UTC).date() + timedelta(days=3)
    folder, made = content_folder(path), []
    for name in ("r-0", "r-1", "r-2"):
        text = Captured(name, "t", "p", (PromptText(0, "user", f"words of {name}"),), (), {}, False, expires)
        sha256 = keep(folder, text)
        entry = {**record().to_entry(), "request_id": name}
        made.append({**entry, "captured": {"expires": expires.isoformat(), "sha256": sha256}})
    write(path, made)
    assert ledger("verify", "--ledger", str(path), "--content")[0] == 0
    file = file_of(folder, expires)
    _, second, third = file.read_text().splitlines(keepends=True)
    file.write_text(second.replace("words", "Words") + third)
    assert ledger("verify", "--ledger", str(path))[0] == 0
    code, out, _ = ledger("verify", "--ledger", str(path), "--content")
    assert (code, out.splitlines()[:2]) == (
        1,
        [
            "ledger.jsonl:2: the captured text of request 'r-1' (entry 2) is not what was written",
            "note: ledger.jsonl:1: the captured text of request 'r-0' (entry 1) is gone, before its last day, "
            f"{expires}",
        ],
    )


def test_verify_of_a_ledger_of_which_only_the_head_is_left_names_the_missing_entries(path: Path) -> None:
    for file in ledger_files(path):
        file.unlink()
    code, out, _ = ledger("verify", "--ledger", str(path))
    assert code == 1
    assert "entries 1 to 12 are missing" in out
