"""What is read of rows is kept: a run that is killed goes on where it was."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from detectors.calibration.captures import plan_captures
from detectors.calibration.feature_store import FeatureError, FeatureStore, Plan
from detectors.calibration.features import ROWS_AT_ONCE, ModelShape, read_features
from detectors.calibration.readers import Served
from detectors.calibration.rows import Row
from detectors.calibration.token_states import TokenStore
from guard.mia.results import AttentionReadout, HiddenReadout, Readouts, RowsReadout
from guard.mia.spec import MiaSpec

PLAN = Plan(layers=(1, 2), heads=((1, 0),), window_layers=(2,), window_tokens=4)
SIZE = 3


def rows_of(count: int, *opening: dict[str, str]) -> list[Row]:
    """``opening``: before each row's own message; a system message if not given."""
    before = opening or ({"role": "system", "content": "s"},)
    return [
        Row(
            f"row-{i}",
            "s",
            f"g{i}",
            "train",
            "benign",
            text=str(i),
            messages=(*before, {"role": "user", "content": str(i)}),
        )
        for i in range(count)
    ]


@dataclass
class CountingReader:
    """Stands for an engine: a row's states are all its own number; its data has 6 tokens, the last four twice that."""

    seen: list[int] = field(default_factory=list)
    pause_s: float = 0.0

    def read(
        self, conversations: list[tuple[dict[str, str], ...]], specs: list[MiaSpec], answer_tokens: int
    ) -> list[Readouts]:
        assert answer_tokens == 0
        time.sleep(self.pause_s)
        return [self._one(int(conversation[-1]["content"])) for conversation in conversations]

    def _one(self, number: int) -> Readouts:
        self.seen.append(number)
        state = np.full(SIZE, number, np.float32)
        tokens = np.stack([state, state, *[2 * state] * 4])
        return Readouts(
            {
                "last1": HiddenReadout("complete", 1, values=state),
                "last2": HiddenReadout("complete", 2, values=state),
                "data2": RowsReadout("complete", 2, positions=tuple(range(6)), values=tokens),
                "a": AttentionReadout(
                    "complete",
                    PLAN.heads,
                    mass={"instruction": np.array([0.25], np.float32), "data": np.array([0.5], np.float32)},
                ),
            }
        )

    @contextmanager
    def opened(self) -> Iterator[CountingReader]:
        yield self


def test_features_are_what_was_read(tmp_path: Path) -> None:
    features = read_features(rows_of(3), FeatureStore("m", PLAN, tmp_path), CountingReader().opened)
    assert features.hidden.shape == (3, 2, SIZE)
    assert features.hidden[2].tolist() == [[2.0] * SIZE] * 2
    assert features.mass[0].tolist() == [[0.25, 0.5]]
    assert features.mean[1, 0] == pytest.approx([10 / 6] * SIZE)
    assert features.tokens.tolist() == [6.0] * 3


def test_of_a_row_without_an_instruction_no_attention_is_read(tmp_path: Path) -> None:
    rows = rows_of(2, {"role": "assistant", "content": "Hello."})
    assert plan_captures(PLAN, rows[0].messages).attention == {}
    assert set(plan_captures(PLAN, rows_of(1)[0].messages).attention) == {"a"}
    features = read_features(rows, FeatureStore("m", PLAN, tmp_path), CountingReader().opened)
    assert np.isnan(features.mass).all()
    assert np.isfinite(features.hidden).all()


def test_rows_that_were_read_are_not_read_again_nor_is_an_engine_opened_for_them(tmp_path: Path) -> None:
    store, reader = FeatureStore("m", PLAN, tmp_path), CountingReader()
    read_features(rows_of(4), store, reader.opened)
    features = read_features(rows_of(6), store, reader.opened)
    assert reader.seen == [0, 1, 2, 3, 4, 5]
    assert features.hidden[:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    def nothing_to_open() -> object:
        raise AssertionError("everything was there")

    read_features(rows_of(6), store, nothing_to_open)


def test_rows_that_another_run_reads_meanwhile_and_rows_that_come_twice_are_not_read_again(tmp_path: Path) -> None:
    store, other = FeatureStore("m", PLAN, tmp_path), CountingReader()
    rows = rows_of(ROWS_AT_ONCE + 2)

    class Together(CountingReader):
        def read(self, conversations: Any, specs: list[MiaSpec], answer_tokens: int) -> list[Readouts]:
            # An engine that is asked for nothing sends nothing.
            assert all(spec.asks for spec in specs)
            read_features(rows[-1:], FeatureStore("m", PLAN, tmp_path), other.opened)
            return super().read(conversations, specs, answer_tokens)

    reader = Together()
    features = read_features([*rows, rows[0]], store, reader.opened)
    assert (reader.seen, other.seen) == (list(range(ROWS_AT_ONCE + 1)), [ROWS_AT_ONCE + 1])
    assert features.hidden[:, 0, 0].tolist() == [*map(float, range(ROWS_AT_ONCE + 2)), 0.0]


def test_another_model_or_plan_reads_for_itself(tmp_path: Path) -> None:
    rows = rows_of(1)
    read_features(rows, FeatureStore("m", PLAN, tmp_path), CountingReader().opened)
    assert not FeatureStore("other", PLAN, tmp_path).has(rows[0].messages)
    assert not FeatureStore("m", Plan((1,), (), (), 4), tmp_path).has(rows[0].messages)


def test_what_an_engine_over_http_reads_is_kept_apart_from_our_own_and_from_other_precisions(tmp_path: Path) -> None:
    rows, served = rows_of(1), Served("tiny", "/models/tiny", "bfloat16", "", "0.29.0", None, PLAN)
    others = [
        replace(served, **changed)
        for changed in (
            {"name": "other"},
            {"root": "/o"},
            {"dtype": "float32"},
            {"quantization": "fp8"},
            {"version": "1"},
        )
    ]
    read_features(rows, FeatureStore(served.kept_under("m"), PLAN, tmp_path), CountingReader().opened)
    keys = ["m", served.kept_under("other"), *(one.kept_under("m") for one in others)]
    assert [key for key in keys if FeatureStore(key, PLAN, tmp_path).has(rows[0].messages)] == []
    assert FeatureStore(served.kept_under("m"), PLAN, tmp_path).has(rows[0].messages)


def test_an_engine_whose_model_has_another_shape_is_refused() -> None:
    served = Served("tiny", "", "", "", "", ModelShape(2, 1, SIZE), PLAN)
    served.check_shape(ModelShape(2, 1, SIZE))
    with pytest.raises(
        FeatureError, match=r"serves tiny, of 2 layers, 1 heads and 3 components; --model is of 3 layers"
    ):
        served.check_shape(ModelShape(3, 1, SIZE))


@pytest.mark.parametrize("kept", ["nothing", "half of the header", "all but the last byte", "other arrays"])
def test_a_row_whose_file_is_not_whole_is_read_again_in_the_same_run(tmp_path: Path, kept: str) -> None:
    store, rows, reader = FeatureStore("m", PLAN, tmp_path), rows_of(3), CountingReader()
    whole = read_features(rows, store, reader.opened)
    path = store.path(rows[1].messages)
    raw = path.read_bytes()
    path.write_bytes(
        save({"last": np.zeros(3, np.float32)})
        if kept == "other arrays"
        else raw[: {"nothing": 0, "half of the header": 40, "all but the last byte": -1}[kept]]
    )
    again = read_features(rows, store, reader.opened)
    assert reader.seen == [0, 1, 2, 1]
    assert np.array_equal(again.hidden, whole.hidden)


def test_what_is_kept_beside_the_readings_is_read_again_where_its_file_is_cut_off(tmp_path: Path) -> None:
    (row,), tokens = rows_of(1), TokenStore("m", (2,), tmp_path)
    values = np.ones((6, SIZE), np.float32)
    tokens.take(row, Readouts({"tokens2": RowsReadout("complete", 2, positions=tuple(range(6)), values=values)}))
    (path,) = tokens.states([row]).paths
    assert not tokens.lacks(row)
    path.write_bytes(path.read_bytes()[:-1])
    assert tokens.lacks(row)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from tests.detectors.calibration.test_features import *\n"
        f"store = FeatureStore('m', PLAN, Path({str(tmp_path / 'kept')!r}))\n"
        "reader = CountingReader(pause_s=0.2)\n"
        f"read_features(rows_of({20 * ROWS_AT_ONCE}), store, reader.opened, lambda n: print(n, flush=True))\n",
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 2 * ROWS_AT_ONCE:
            pass
        process.send_signal(signal.SIGKILL)
    store, reader = FeatureStore("m", PLAN, tmp_path / "kept"), CountingReader()
    reported: list[int] = []
    features = read_features(rows_of(20 * ROWS_AT_ONCE), store, reader.opened, reported.append)
    assert reported[0] >= 2 * ROWS_AT_ONCE
    assert len(reader.seen) == 20 * ROWS_AT_ONCE - reported[0] > 0
    assert features.hidden[:, 1, 0].tolist() == list(map(float, range(20 * ROWS_AT_ONCE)))


def test_a_row_without_readout_is_named(tmp_path: Path) -> None:
    class Dropping(CountingReader):
        def _one(self, number: int) -> Readouts:
            whole = super()._one(number)
            return Readouts({**whole.items, "last2": HiddenReadout("dropped", 2, reason="no room")})

    with pytest.raises(FeatureError, match=r"row row-0: no hidden state of layer 2: dropped no room"):
        read_features(rows_of(1), FeatureStore("m", PLAN, tmp_path), Dropping().opened)
