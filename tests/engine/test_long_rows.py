"""A row of more states than one answer holds, read over HTTP for calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from detectors.calibration.feature_store import FeatureStore, Plan
from detectors.calibration.features import read_features
from detectors.calibration.readers import http_reader, served_engine
from detectors.calibration.rows import Row
from tests.engine.server import KEY, MAX_BYTES, Server

PLAN = Plan(layers=(1, 2, 3), heads=(), window_layers=(1, 2, 3), window_tokens=32)
MESSAGES = ({"role": "system", "content": "Help."}, {"role": "user", "content": "why " * 450})


def test_all_of_its_states_are_read(server: Server, tmp_path: Path) -> None:
    url, row = f"{server.url}/v1", Row("long", "s", "g", "train", "benign", text="why", messages=MESSAGES)
    engine = served_engine(url, KEY)
    features = read_features([row], FeatureStore("m", PLAN, tmp_path), lambda: http_reader(url, KEY, engine))
    assert features.tokens[0] * features.mean[0].size * 4 > MAX_BYTES
    assert np.isfinite(features.mean).all()
    assert features.mean.any(axis=-1).all()
