"""What is measured is what is served: scores of the proxy, of the engine over HTTP, and of transformers agree."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from detectors.attention_tracker import AttentionTracker
from detectors.calibration.feature_store import FeatureError, FeatureStore
from detectors.calibration.features import ModelShape, model_shape, read_features
from detectors.calibration.readers import http_reader, served_engine
from detectors.calibration.rows import Row, default_rows
from detectors.calibration.scoring import scores_of
from detectors.probe import Probe
from guard.data import data_folder
from guard.models import resolve_model
from tests.conftest import RunningPair

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Two benign rows and two attacks."""
    held_out = [row for row in default_rows(0, ["bastioncorpus"]) if row.split == "held_out" and len(row.text) < 300]
    return [row for label in ("benign", "attack") for row in [one for one in held_out if one.label == label][:2]]


def ledger_scores(pair: RunningPair, row: Row) -> dict[str, float]:
    client = OpenAI(base_url=f"{pair.proxy_url}/v1", api_key="unused", max_retries=0)
    try:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=row.messages, max_tokens=1)
        request_id = raw.headers["x-guard-request-id"]
    except BadRequestError as blocked:
        request_id = blocked.response.headers["x-guard-request-id"]
    for _ in range(100):
        for line in pair.ledger_path.read_text(encoding="utf-8").splitlines():
            if request_id in line:
                scores: dict[str, float] = json.loads(line)["scores"]
                return scores
        time.sleep(0.05)
    raise AssertionError("the request has no line in the ledger")


def test_the_proxy_scores_as_the_evaluation_does(running_pair: RunningPair, rows: list[Row], tmp_path: Path) -> None:
    configs = data_folder("model_configs")
    probe = Probe.load(configs / "probe" / "SmolLM2-135M-Instruct.json")
    tracker = AttentionTracker.load(configs / "attention_tracker" / "SmolLM2-135M-Instruct.json")
    url = f"{running_pair.engine_url}/v1"
    engine = served_engine(url, None)
    engine.check_shape(model_shape(Path(resolve_model(MODEL).path)))
    with pytest.raises(
        FeatureError, match=r"serves smollm2-135m, of 30 layers, 9 heads and 576 components; --model is of"
    ):
        engine.check_shape(ModelShape(24, 14, 896))
    assert engine.dtype == "float32"
    features = read_features(
        rows, FeatureStore("served", engine.plan, tmp_path), lambda: http_reader(url, None, engine)
    )
    served = [ledger_scores(running_pair, row) for row in rows]
    assert scores_of(probe, features) == pytest.approx([scores["injection"] for scores in served], abs=1e-4)
    assert scores_of(tracker, features) == pytest.approx([scores["focus"] for scores in served], abs=1e-4)
    assert offline(probe, rows) == pytest.approx(scores_of(probe, features), abs=1e-3)


def offline(probe: Probe, rows: list[Row]) -> list[float]:
    """The same probe on the stream after the same blocks, as transformers computes it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model(MODEL).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    stream: dict[int, np.ndarray] = {}
    for layer, block in enumerate(model.model.layers, 1):
        block.register_forward_hook(lambda _, __, out, at=layer: stream.update({at: _last(out)}))
    scores = []
    for row in rows:
        tokens = tokenizer.apply_chat_template(
            list(row.messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            model(**tokens)
        x = np.concatenate([stream[layer] for layer in probe.config.params.layers]).astype(np.float64)
        scores.append(float(1 / (1 + np.exp(-(x @ probe.weight + probe.bias)))))
    return scores


def _last(output: Any) -> np.ndarray:
    hidden = output[0] if isinstance(output, tuple) else output
    values: np.ndarray = hidden[0, -1].numpy()
    return values


def test_a_server_that_has_no_taps_to_tell_of_is_told_how_to_start(running_pair: RunningPair) -> None:
    # The proxy has no such route, as a vLLM without the plugin has none.
    with pytest.raises(FeatureError, match=r"does not say what it has taps for \(404\): .* VLLM_PLUGINS=mia"):
        served_engine(f"{running_pair.proxy_url}/v1", None)
