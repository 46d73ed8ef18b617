"""Data inside wheels: pinned, checked, read as archives, never run."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from detectors.calibration import wheels
from detectors.calibration.sets import agentdojo, small_benchmarks
from detectors.calibration.sources import DataError
from detectors.calibration.wheels import WHEELS, Wheel, class_strings, pull, read_jsonl, read_text, wheel_path

CODE = """
raise SystemExit("this file must not be run")

class Task:
    _WHOM = "Ada"
    _COUNT = 3
    PROMPT = f"Greet {_WHOM} {_COUNT} times" + "!"

class Other:
    PROMPT = f"{compute()}"
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of our own in a cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "mia-guard" / "data" / "tiny-1-py3-none-any.whl"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/rows.jsonl", '{"a": 1}\n\n{"a": 2}\n')
        archive.writestr("tiny/code.py", CODE)
        archive.writestr("tiny/windows.txt", "one\r\ntwo")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(WHEELS, "tiny", Wheel("tiny", "1", path.name, sha256, path.stat().st_size, "MIT"))
    return path


def test_a_wheels_files_are_read_without_installing_it(tiny: Path) -> None:
    assert pull("tiny") == tiny
    assert [row["a"] for row in read_jsonl("tiny", "tiny/rows.jsonl")] == [1, 2]
    assert read_text("tiny", "tiny/windows.txt") == "one\ntwo"


def test_strings_of_classes_are_parsed_and_code_is_not_run(tiny: Path) -> None:
    assert class_strings("tiny", "tiny/code.py", "PROMPT") == {"Task": "Greet Ada 3 times!"}


def test_a_wheel_with_another_hash_is_refused(tiny: Path) -> None:
    tiny.write_bytes(tiny.read_bytes() + b"more")
    with pytest.raises(DataError, match="SHA-256"):
        pull("tiny")


def test_a_wheel_that_is_not_there_says_how_to_get_it(tiny: Path) -> None:
    tiny.unlink()
    with pytest.raises(DataError, match="guard data pull tiny"):
        read_text("tiny", "tiny/windows.txt")


def test_what_cannot_be_fetched_says_where_to_put_the_file(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError, match=r"Put the file tiny-1-py3-none-any\.whl into"):
        pull("tiny")
    assert list(tiny.parent.iterdir()) == []


def test_pulled_sets_are_the_pinned_ones_and_have_what_their_cards_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("agent-injection-bench", "agentdojo"):
        assert pull(name) == wheel_path(name)
    content = agentdojo.content()
    assert {text.label for text in content.texts} == {"benign"}
    assert len(content.goals) >= 25
    assert not any("{" in document.text and "injection" in document.text for document in content.documents)
    labels = [text.label for text in small_benchmarks.agent_injection().texts]
    assert (labels.count("attack"), labels.count("benign")) == (21, 3)


def test_every_wheel_is_pinned_by_its_whole_file_name_and_hash() -> None:
    for name, wheel in wheels.WHEELS.items():
        assert wheel.file.startswith(f"{name.replace('-', '_')}-{wheel.version}-")
        assert len(wheel.sha256) == 64
        assert wheel.size_bytes > 0
