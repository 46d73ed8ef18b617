"""The set long-documents: read from archives, half of the packages to fit to, nothing of it in other rows."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from detectors.calibration import wheels
from detectors.calibration.data import chosen_sets
from detectors.calibration.long_rows import half_of, long_rows
from detectors.calibration.sets import long_benign
from detectors.calibration.sets.long_benign import LENGTHS, LongDocument, long_documents
from detectors.calibration.sources import DataError
from detectors.calibration.wheels import Wheel, document_table, document_wheels
from detectors.windows import Windows, passes_of
from guard.cli import app
from tests.detectors.calibration.tiny_model import texts


def prose(count: int, key: str) -> str:
    return "\n".join(f"{line}." for line in texts(count, key))


def make_wheel(folder: Path, name: str) -> Wheel:
    """With a README, docstrings, pages of help and questions; 40 lines of each, of no likeness to one another."""
    path = folder / f"{name}-1-py3-none-any.whl"
    asked = [{"q": f"{line}?", "a": line} for line in texts(60, f"{name} asked")]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.dist-info/METADATA", f"Name: {name}\n\n<b>{prose(60, name)}</b>")
        archive.writestr(f"{name}/code.py", f'"""{prose(40, name + "code")}"""\nraise SystemExit("must not be run")\n')
        archive.writestr(f"{name}/help/one.rst", prose(60, f"{name} page"))
        archive.writestr(f"{name}/help/short.rst", prose(3, f"{name} short"))
        archive.writestr(f"{name}/asked.jsonl", "\n".join(map(json.dumps, asked)))
    return Wheel(name, "1", path.name, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size, "MIT")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six wheels of our own in a cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "mia-guard" / "data"
    folder.mkdir(parents=True)
    made = {name: make_wheel(folder, name) for name in ("ape", "bee", "cat", "dog", "eel", "fox")}
    entries = [
        {"name": name, "file": "", "lang": "pt", "pages": {f"{name}/help/": "fr"}, "faq": {f"{name}/asked.jsonl": "sv"}}
        for name in made
    ]
    monkeypatch.setattr(wheels, "document_wheels", lambda: made)
    monkeypatch.setattr(long_benign, "document_table", lambda: entries)


@pytest.mark.usefixtures("tiny")
def test_readme_docstrings_pages_and_questions_are_read_and_no_code_is_run() -> None:
    found = long_documents()
    assert {(one.kind, one.lang) for one in found} == {
        ("readme", "pt"),
        ("docstrings", "en"),
        ("pages", "fr"),
        ("faq", "sv"),
    }
    assert {one.package for one in found} == {"ape", "bee", "cat", "dog", "eel", "fox"}
    assert not any("<b>" in one.text for one in found)
    assert len({one.id for one in found}) == len({one.text for one in found}) == len(found)
    assert all(450 <= len(one.text) <= LENGTHS[-1][0] for one in found)
    assert found == long_documents()


@pytest.mark.usefixtures("tiny")
def test_a_package_is_fitted_to_or_measured_on_and_each_half_has_half_of_the_documents() -> None:
    rows = long_rows(0, tool_role=True)
    sides = {name: {one.fitted for one in rows if one.package == name} for name in {one.package for one in rows}}
    assert all(len(side) == 1 for side in sides.values())
    assert 0.25 < sum(one.fitted for one in rows) / len(rows) <= 0.5
    assert {one.row.label for one in rows} == {"benign"}
    assert {one.row.place for one in rows} == {"tool", "document"}
    assert all(passes_of(one.row.messages, Windows())[0] for one in rows)


def test_another_seed_divides_packages_otherwise() -> None:
    documents = [LongDocument(f"{i}", f"package {i // 3}", "readme", "en", "") for i in range(60)]
    assert len(half_of(documents, 0)) == len(half_of(documents, 1)) == 10
    assert half_of(documents, 0) != half_of(documents, 1)


def test_documents_that_begin_alike_are_taken_once(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    once = len(long_documents())
    twice = [*long_benign.document_table(), *long_benign.document_table()]
    monkeypatch.setattr(long_benign, "document_table", lambda: twice)
    assert len(long_documents()) == once


def test_a_wheel_that_is_not_there_is_named_with_what_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match="guard data pull"):
        long_documents()


def test_every_wheel_is_pinned_runs_anywhere_and_has_a_permissive_licence() -> None:
    made = document_wheels()
    assert len(made) > 50
    assert {one["name"] for one in document_table()} == {*made, "zaragoza-construction-faq"}
    for wheel in made.values():
        assert wheel.file.endswith("-none-any.whl")
        assert wheel.version in wheel.file
        assert len(wheel.sha256) == 64
        assert wheel.licence.split(" ")[0] in {"MIT", "BSD", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Apache-2.0"}


def test_the_set_is_no_data_of_other_calibrations() -> None:
    assert "long-documents" not in chosen_sets(["all"])[0]
    with pytest.raises(DataError, match="no data set 'long-documents'"):
        chosen_sets(["long-documents"])


@pytest.mark.usefixtures("tiny")
def test_pull_and_list_know_the_set() -> None:
    run = CliRunner()
    assert "long-documents" in run.invoke(app, ["data", "list"]).output
    outcome = run.invoke(app, ["data", "pull", "long-documents"])
    assert outcome.exit_code == 0, outcome.output
    assert "fox-1-py3-none-any.whl" in outcome.output
