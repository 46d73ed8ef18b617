"""Detectors that read what is not kept of rows: calibrated and evaluated as commands, with a real engine, and compared
with what the same detectors make of the same engine without the kit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from detectors.attention_tracker import AttentionTracker
from detectors.calibration import material
from detectors.calibration.as_read import captures_of, lacking_taps, reads_beyond
from detectors.calibration.data import load_rows
from detectors.calibration.feature_store import Plan
from detectors.calibration.features import full_plan, model_shape
from detectors.calibration.readers import OfflineReader
from detectors.calibration.rows import Row
from detectors.probe import Probe
from detectors.registry import build_detector
from guard.cli import app
from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.uses import asking, detectors_offline
from tests.detectors.calibration.tiny_model import write_rows
from tests.detectors.weights import write
from tests.engine import engines, oracle

HEADS = [[0, 0], [1, 3], [2, 1]]


@dataclass(frozen=True)
class Tiny:
    """``folder`` has the model, named tiny; ``rows``: those of the file ``data``."""

    folder: Path
    llm: MiaLLM
    data: Path
    rows: list[Row]
    size: int

    @property
    def model(self) -> Path:
        return self.folder / "tiny"

    def run(self, *command: str) -> Result:
        rows = ("--model", str(self.model), "--data", str(self.data), "--rows", "0")
        return CliRunner().invoke(app, [*command, *rows])

    def report(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "report" / "report.json").read_text(encoding="utf-8"))
        return content


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder = tmp_path_factory.mktemp("as-read")
    model = oracle.save("llama", folder / "tiny")
    shape = model_shape(model)
    plan = full_plan(shape)
    config = EngineConfig(hidden_layers=plan.layers, attention_heads=plan.heads, max_hidden_rows_per_step="tokens")
    data = write_rows(folder / "mine.jsonl", 70)
    with pytest.MonkeyPatch.context() as environment, engines.engine(model, config) as llm:
        environment.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        # One engine for all commands, in place of one for each.
        environment.setattr(material, "offline_reader", lambda *_: nullcontext(OfflineReader(llm)))
        yield Tiny(folder, llm, data, load_rows([str(data)], 0, None, True), shape.hidden_size)


def test_a_probe_of_the_highest_token_is_calibrated_and_hits_what_its_file_says(tiny: Tiny) -> None:
    out = tiny.folder / "calibrated"
    outcome = tiny.run("calibrate", "probe", "--pooling", "max", "--out", str(out))
    assert outcome.exit_code == 0, outcome.output
    probe = build_detector("probe", out / "probe" / "tiny.json")
    assert isinstance(probe, Probe)
    assert probe.config.params.pooling == "max"
    assert probe.config.calibration is not None
    assert "--pooling max" in probe.config.calibration.command
    held_out = [row for row in tiny.rows if row.split == "held_out"]
    scores = alone(tiny, probe, held_out, 1)
    point = probe.config.calibration.thresholds["balanced"]
    hits = [
        sum(scores[i] >= point.value for i, row in enumerate(held_out) if row.label == y) for y in ("benign", "attack")
    ]
    # Calibration goes by float16.
    assert hits == pytest.approx([point.held_out_false_positives, point.held_out_true_positives], abs=1)


@pytest.mark.parametrize(
    ("params", "answer_tokens"),
    [({"windows": {"characters": 60, "stride": 30}}, 0), ({"generated_tokens": 3}, 3)],
)
def test_what_is_not_kept_of_rows_is_evaluated_as_it_is_served(
    tiny: Tiny, params: dict[str, Any], answer_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = tiny.folder / f"configs{answer_tokens}"
    write(configs / "attention_tracker", "attention_tracker", important_heads=HEADS, **params)
    of_probe = {name: value for name, value in params.items() if name == "windows"}
    weight = np.random.default_rng(5).normal(size=2 * tiny.size).astype(np.float32) / 8
    linear = {"weight": weight, "bias": np.array([0.25], np.float32)}
    write(
        configs / "probe", "probe", linear,
        layers=[1, 3], hidden_size=tiny.size, pooling="max", **of_probe,
    )  # fmt: skip
    command = ("eval", "--model-configs", str(configs), "--out", str(tiny.folder / "report"))
    outcome = tiny.run(*command)
    assert outcome.exit_code == 0, outcome.output
    assert "only text_baseline is measured" in outcome.output.replace("\n", " ")
    first = tiny.report()
    assert "not_evaluated" not in first["about"]
    held_out = [row for row in tiny.rows if row.split == "held_out"]
    labels = [row.label == "attack" for row in held_out]
    for kind in ("attention_tracker", "probe"):
        scores = alone(tiny, build_detector(kind, configs / kind / "tiny.json"), held_out, 1 + answer_tokens)
        assert first["detectors"][kind]["pooled"]["auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=0.01)
    # And scores are kept: nothing is read again.
    monkeypatch.setattr(material, "offline_reader", lambda *_: pytest.fail("everything was there"))
    assert tiny.run(*command).exit_code == 0
    assert tiny.report()["detectors"] == first["detectors"]
    windows = [line for line in outcome.output.splitlines() if "the highest of each row and its windows" in line]
    assert [line.partition(":")[0] for line in windows] == (["probe", "attention_tracker"] if of_probe else [])


def alone(tiny: Tiny, detector: Any, rows: list[Row], tokens: int) -> list[float]:
    """The detector's scores, each of a request of its own spec."""
    scored = detectors_offline.score(asking.offline(tiny.llm), detector, [list(row.messages) for row in rows], tokens)
    values = [one.score.value for one in scored]
    assert None not in values
    return [value for value in values if value is not None]


def test_what_an_engine_that_runs_has_no_taps_or_room_for_is_told(tmp_path: Path) -> None:
    tracker = AttentionTracker.load(
        write(tmp_path / "t", "attention_tracker", important_heads=HEADS, generated_tokens=2)
    )
    zeros = {"weight": np.zeros(4, np.float32), "bias": np.zeros(1, np.float32)}
    pooled = {
        name: write(tmp_path / name, "probe", zeros, layers=[2], hidden_size=4, pooling=name)
        for name in ("mean", "max")
    }
    mean, highest = (Probe.load(path) for path in pooled.values())
    whole = Plan((1, 2), ((1, 0), (2, 3), (3, 1)), (2,), 32)
    assert [reads_beyond(one, whole) for one in (tracker, mean, highest, object())] == [True, False, True, False]
    assert [lacking_taps(captures_of(one), whole) for one in (tracker, highest)] == ["", ""]
    without_room = Plan((1, 2), ((1, 0),), (), 32)
    assert reads_beyond(mean, without_room)
    assert "max_hidden_rows_per_step is too small" in lacking_taps(captures_of(mean), without_room)
    assert "no taps for the attention of heads [[2, 3], [3, 1]]" in lacking_taps(captures_of(tracker), without_room)
    assert "no taps for hidden states of layers [2]" in lacking_taps(captures_of(highest), Plan((1,), (), (1,), 32))
