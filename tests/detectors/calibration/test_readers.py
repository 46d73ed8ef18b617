"""Reading over HTTP: what does not fit into one answer is asked for in more, and what fits into none is told."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from detectors.calibration.feature_store import FeatureError, FeatureStore, Plan
from detectors.calibration.features import read_features
from detectors.calibration.readers import HttpReader, plan_of_taps, served_engine
from detectors.calibration.rows import Row
from guard.mia.engine_config import EngineConfig
from guard.mia.results import Readout, Readouts, RowsReadout
from guard.mia.spec import MiaSpec

ROW = Row("long", "s", "g", "train", "benign", text="why", messages=({"role": "user", "content": "why"},))


@dataclass
class Filling:
    """Stands for a client of an engine whose answers hold ``room`` captures; ``asked``: how many each was asked for.
    ``too_large``: captures that fit into none."""

    room: int
    too_large: frozenset[str] = frozenset()
    asked: list[int] = field(default_factory=list)

    def generate(self, *_: Any, extra_xargs: dict[str, str], **__: Any) -> Any:
        names = MiaSpec.model_validate_json(extra_xargs["mia"]).hidden
        self.asked.append(len(names))
        items: dict[str, Readout] = {}
        for name in names:
            fits = (
                name not in self.too_large
                and len([one for one in items.values() if one.values is not None]) < self.room
            )  # type: ignore[union-attr]
            items[name] = (
                RowsReadout("complete", 1, (0,), (7,), np.full((1, 4), int(name[-1]), np.float32))
                if fits
                else RowsReadout("dropped", 1, reason="no space in an answer (max_answer_bytes); ask for files")
            )
        return SimpleNamespace(mia={"readouts": [Readouts(items).to_wire()]})


class _Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the terminal."""


def test_a_key_that_the_engine_refuses_is_told_with_the_option() -> None:
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(
                FeatureError, match=r"refuses the key \(401\): .*--api-key, or in GUARD_UPSTREAM_API_KEY"
            ):
                served_engine(f"http://127.0.0.1:{server.server_port}/v1", "wrong")
        finally:
            server.shutdown()


def spec_of(*names: str) -> MiaSpec:
    return MiaSpec.model_validate({"hidden": {name: {"layer": 1, "positions": "prompt"} for name in names}})


def test_what_did_not_fit_is_asked_for_until_all_is_there() -> None:
    client = Filling(room=2)
    (read,) = HttpReader(client, "tiny").read([ROW.messages], [spec_of("h1", "h2", "h3", "h4", "h5")], 0)  # type: ignore[arg-type]
    assert client.asked == [5, 3, 1]
    assert [one.values[0, 0] for _, one in sorted(read.items.items())] == [1, 2, 3, 4, 5]  # type: ignore[union-attr,index]


def test_what_fits_into_no_answer_names_row_and_setting_and_is_not_asked_for_again(tmp_path: Path) -> None:
    client = Filling(room=2, too_large=frozenset({"data3"}))
    plan = Plan(layers=(), heads=(), window_layers=(1, 2, 3), window_tokens=32)
    told = r"^row long: no hidden states of the data at layer 3: dropped it alone is larger than .*max_answer_bytes"
    with pytest.raises(FeatureError, match=told):
        read_features([ROW], FeatureStore("m", plan, tmp_path), lambda: nullcontext(HttpReader(client, "tiny")))  # type: ignore[arg-type]
    assert client.asked == [3, 1]


@pytest.mark.parametrize(("rows", "room"), [("tokens", True), (4096, True), (4095, False), (None, False)])
def test_whatever_an_engine_is_started_with_says_whether_every_token_can_be_read(rows: Any, room: bool) -> None:
    taps = EngineConfig(hidden_layers=(3, 7), attention_heads=((4, 1),), max_hidden_rows_per_step=rows)
    plan = plan_of_taps(json.loads(taps.model_dump_json()))
    assert (plan.layers, plan.heads, plan.window_layers) == ((3, 7), ((4, 1),), (3, 7) if room else ())


def test_a_setting_of_another_version_is_told_by_name() -> None:
    with pytest.raises(FeatureError, match="max_hidden_rows_per_step is 'blocks', which this version does not know"):
        plan_of_taps({"hidden_layers": [3], "max_hidden_rows_per_step": "blocks"})
