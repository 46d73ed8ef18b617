"""Probes with windows: fitted to fragments, thresholds that keep budgets among rows and among documents, refusals."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from detectors.calibration import long_rows, material, of_windows
from detectors.calibration.data import load_rows
from detectors.calibration.fit_windows import Served, fit_windows
from detectors.calibration.logistic import fit
from detectors.calibration.long_rows import OWN, own_long_rows
from detectors.calibration.metrics import BUDGETS, Tried, rows_needed, values_within_budgets
from detectors.calibration.rows import Message, Row
from detectors.calibration.sets.long_benign import LongDocument
from detectors.calibration.window_rows import WindowRows
from detectors.probe import Probe
from detectors.windows import Windows
from guard.cli import app
from guard.mia.results import AttentionReadout, HiddenReadout, Readout, Readouts
from guard.mia.spec import MiaSpec
from tests.detectors.calibration.tiny_model import SIZE, make_model, plant, texts, write_rows


def served(generator: np.random.Generator, documents: int, windows: int, fragment: float) -> Served:
    """Documents whose windows look a little like attacks (first component), and like fragments (second)."""
    whole = generator.normal(size=(documents, 6))
    of_windows = generator.normal(size=(documents * windows, 6))
    of_windows[:, 0] += fragment
    of_windows[:, 1] += 6.0
    of = {i: tuple(range(i * windows, (i + 1) * windows)) for i in range(documents)}
    return Served(whole, of_windows, WindowRows((), of, 0))


def test_a_probe_that_has_seen_fragments_no_longer_takes_them_for_attacks() -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], 200)
    x = generator.normal(size=(400, 6))
    x[labels == 1, 0] += 5.0
    groups, packages = [f"row {i}" for i in range(400)], [f"package {i // 3}" for i in range(60)]
    documents, others = (served(generator, 60, 8, fragment=3.0) for _ in range(2))
    fitted = fit_windows(x, labels, groups, documents, packages, 1e-2, 0)
    plain = fit(x, labels, 1e-2)
    assert np.mean(others.scores(plain) > 0) > 0.9
    assert np.mean(others.scores(fitted.linear) > 0) < 0.3
    assert np.mean(fitted.of_documents > 0) < 0.3
    assert np.mean(fitted.of_rows[labels == 1] > 0) > 0.85


def test_a_documents_score_out_of_fold_is_by_a_fit_that_saw_nothing_of_its_package() -> None:
    generator = np.random.default_rng(1)
    labels, x = np.repeat([0, 1], 60), generator.normal(size=(120, 6))
    x[labels == 1, 0] += 6.0
    documents = served(generator, 20, 3, fragment=0.0)
    # One package alone looks like attacks: whoever saw it would know that it is benign.
    odd = [window for i in range(4) for window in documents.windows.of[i]]
    documents.of_windows[odd, 0] += 6.0
    packages = ["odd"] * 4 + [f"package {i}" for i in range(4, 20)]
    fitted = fit_windows(x, labels, [str(i) for i in range(120)], documents, packages, 1e-2, 0)
    assert fitted.of_documents[:4].min() > max(fitted.of_documents[4:].max(), 0)
    assert np.all(fitted.of_documents[:4] > documents.scores(fitted.linear)[:4])


SCORES = st.lists(st.floats(0, 1), min_size=60, max_size=400).map(np.array)


@given(SCORES, SCORES)
def test_each_budget_is_kept_among_rows_and_among_documents(benign: np.ndarray, documents: np.ndarray) -> None:
    rows = Tried(np.append(benign, [0.9, 1.0]), np.append(np.zeros(len(benign), np.int64), [1, 1]))
    values = values_within_budgets(rows, Tried(documents, np.zeros(len(documents), np.int64)))
    for name, budget in BUDGETS.items():
        supported = len(benign) + len(documents) >= rows_needed(budget)
        assert name not in values or supported
        if name in values:
            assert np.mean(benign >= values[name]) <= budget
            assert np.mean(documents >= values[name]) <= budget


def test_copies_of_a_document_count_once() -> None:
    rows = Tried(np.linspace(0, 0.5, 250), np.repeat([0, 1], [240, 10]))
    many = np.linspace(0, 0.6, 70)
    assert "fpr_1pct" in values_within_budgets(rows, Tried(many, np.zeros(70, np.int64)))
    copies = Tried(many, np.zeros(70, np.int64), [str(i // 2) for i in range(70)])
    assert "fpr_1pct" not in values_within_budgets(rows, copies)


class Planted:
    """In place of an engine: states of noise, of what its conversation says."""

    def read(
        self, conversations: Sequence[Sequence[Message]], specs: Sequence[MiaSpec], answer_tokens: int
    ) -> list[Readouts]:
        assert answer_tokens == 0
        return [self._one(*one) for one in zip(conversations, specs, strict=True)]

    def _one(self, conversation: Sequence[Message], spec: MiaSpec) -> Readouts:
        noise = np.random.default_rng(zlib.crc32(json.dumps(list(conversation)).encode()))
        items: dict[str, Readout] = {
            name: HiddenReadout("complete", one.layer, position=0, values=noise.normal(size=SIZE).astype(np.float32))
            for name, one in spec.hidden.items()
            if isinstance(one.layer, int)
        }
        for name, capture in spec.attention.items():
            mass = {span: np.full(len(capture.heads), 0.3, np.float32) for span in spec.spans}
            items[name] = AttentionReadout("complete", tuple(capture.heads), positions=(0,), mass=mass)
        return Readouts(items)


def documents(count: int, per_package: int) -> list[LongDocument]:
    lines = texts(10 * count, "documents")
    return [
        LongDocument(
            f"document-{i}",
            f"package {i // per_package}",
            ("readme", "docstrings")[i % 2],
            "en",
            "\n".join(next(lines) + "." for _ in range(10)),
        )
        for i in range(count)
    ]


@contextmanager
def calibrated(folder: Path, count: int) -> Iterator[tuple[Path, Path, Result]]:
    """The model, the rows' file and what the command did, with so many long documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(long_rows, "long_documents", lambda: documents(count, 4))
        patch.setattr(of_windows, "packages", list)
        started: list[str] = []

        @contextmanager
        def reader(*_: object) -> Iterator[Planted]:
            started.append("an engine")
            yield Planted()

        patch.setattr(material, "offline_reader", reader)
        model, path = make_model(folder / "tiny"), write_rows(folder / "rows.jsonl", 100)
        plant(model, load_rows([str(path)], 0, None, True))
        yield model, path, run(model, path)
        assert len(started) == (count >= 130)


def run(model: Path, rows: Path, *more: str) -> Result:
    options = ["--model", str(model), "--data", str(rows), "--rows", "0", "--out", str(model.parent / "configs")]
    return CliRunner().invoke(app, ["calibrate", "probe", "--windows", *options, *more])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Result]]:
    with calibrated(tmp_path_factory.mktemp("windows"), 140) as found:
        yield found


def test_the_file_has_windows_thresholds_and_what_they_do_on_documents_by_kind(
    made: tuple[Path, Path, Result],
) -> None:
    model, _, outcome = made
    assert outcome.exit_code == 0, outcome.output
    assert "config: tiny-windows" in outcome.output
    probe = Probe.load(model.parent / "configs" / "probe" / "tiny-windows.json")
    record = probe.config.calibration
    assert probe.windows == Windows()
    assert record is not None
    assert set(record.thresholds) == {"fpr_5pct", "balanced"}
    assert "fpr_1pct" in outcome.output
    assert set(record.parts) == {
        "benign documents of packages that were fitted to, out of fold",
        "benign documents, readme",
        "benign documents, docstrings",
        "benign documents",
    }
    assert record.parts["benign documents"].rows == 72
    fitted = record.parts["benign documents of packages that were fitted to, out of fold"]
    assert fitted.hits["fpr_5pct"] / fitted.rows <= 0.05
    point = record.thresholds["fpr_5pct"]
    assert point.validation_benign == 70 + fitted.rows
    assert point.held_out_benign == 30 + 72
    assert "--windows" in record.command
    sources = {source.name: source for source in record.data}
    assert sources["long-documents"].rows == {"train": {"benign": 68}, "held_out": {"benign": 72}}


def test_a_run_that_is_started_again_reads_nothing_twice(
    made: tuple[Path, Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows, _ = made
    path = model.parent / "configs" / "probe" / "tiny-windows.json"
    before = json.loads(path.read_bytes())
    monkeypatch.setattr(material, "offline_reader", None)
    assert run(model, rows).exit_code == 0
    assert json.loads(path.read_bytes()) == before


def test_eval_measures_the_file_by_its_name_and_tells_its_thresholds(made: tuple[Path, Path, Result]) -> None:
    model, rows, _ = made
    options = ["--model", str(model), "--data", str(rows), "--model-configs", str(model.parent / "configs")]
    more = ["--config", "tiny-windows", "--no-leave-one-out", "--out", str(model.parent / "report")]
    outcome = CliRunner().invoke(app, ["eval", *options, *more])
    assert outcome.exit_code == 0, outcome.output
    content: dict[str, Any] = json.loads((model.parent / "report" / "report.json").read_text(encoding="utf-8"))
    assert content["detectors"]["probe"]["thresholds"].keys() == {"fpr_5pct", "balanced"}
    assert content["detectors"]["probe"]["remarks"] == []
    assert "--config tiny-windows" in content["about"]["command"]


def test_too_few_documents_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    with calibrated(tmp_path, 100) as (model, _, outcome):
        assert outcome.exit_code == 1
        assert "48 different long benign documents to fit" in outcome.output
        assert "at least 60 are needed" in outcome.output
        assert not (model.parent / "configs" / "probe" / "tiny-windows.json").exists()


@pytest.mark.parametrize("words", [("text_baseline",), ("--pooling", "mean")])
def test_windows_are_for_the_probe_at_the_last_token_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    outcome = run(tmp_path, tmp_path / "rows.jsonl", *words)
    assert outcome.exit_code == 2
    assert "--windows is for probe alone" in outcome.output


def test_of_own_rows_the_long_benign_ones_take_part() -> None:
    def row(label: Any, words: int, origin: str) -> Row:
        said = ({"role": "user", "content": "word " * words},)
        return Row(f"{label}{words}{origin}", "own", "group", "train", label, messages=said, origin=origin)

    rows = [row("benign", 200, "f: row 1"), row("benign", 20, "f: row 2"), row("attack", 200, "f: row 3")]
    found = own_long_rows([*rows, row("benign", 200, "")], Windows())
    assert [(one.row.origin, one.kind, one.package, one.fitted) for one in found] == [("f: row 1", OWN, "group", True)]
