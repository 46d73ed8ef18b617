"""What the aperture counts, without an engine: by which words, and by several API servers together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from guard.mia import assembly, routing, server
from guard.mia.metrics import SPACES, ApertureMetrics, asks_for, space_in
from guard.mia.results import HiddenReadout, RowsReadout, SteeringReport
from guard.mia.spec import HiddenCapture, MiaSpec, Steer

READS = MiaSpec(hidden={"h": HiddenCapture(layer=1)})
STEERS = MiaSpec(steer=(Steer(vector="calm", layer=1, coefficient=1.0),))


@pytest.mark.parametrize(
    "reason",
    [
        *(assembly.NO_RING, assembly.TOO_LONG, server.TOO_LARGE),
        *(routing.NO_HIDDEN_ROWS, routing.NO_QUERY_ROWS, routing.NO_MEMORY),
        "these rows were read too late (max_shared_bytes)",
        "the server's artifact folder has no room for 3 bytes (max_artifact_bytes)",
    ],
)
def test_every_reason_for_dropping_a_readout_names_a_setting_that_is_counted(reason: str) -> None:
    assert space_in(reason) in SPACES


def test_a_reason_without_a_setting_and_one_of_somebody_elses_are_counted_as_other() -> None:
    assert space_in("the worker is gone") == space_in("(max_anything)") == "other"


def test_what_a_request_asks_for_is_one_of_four_words() -> None:
    both = READS.model_copy(update={"steer": STEERS.steer})
    assert [asks_for(one) for one in (None, MiaSpec(), READS, STEERS, both)] == [
        *("nothing", "nothing", "readouts", "steering", "both")
    ]


def test_a_steering_that_no_step_reported_is_not_counted() -> None:
    metrics = ApertureMetrics(CollectorRegistry())
    metrics.count_steering(STEERS, ())
    metrics.count_steering(STEERS, [SteeringReport(steered_tokens=5, relative_dose=0.2, limited_tokens=2)])
    assert metrics.steered_requests._value.get() == 1
    assert metrics.steered_tokens.labels("limited")._value.get() == 2
    assert metrics.steered_tokens.labels("whole")._value.get() == 3


def test_only_complete_readouts_have_rows_and_bytes() -> None:
    metrics = ApertureMetrics(CollectorRegistry())
    values = np.zeros((3, 4), np.float32)
    metrics.count_readouts(
        [
            RowsReadout("complete", 1, (0, 1, 2), values=values),
            RowsReadout("dropped", 1, reason=assembly.NO_RING),
            HiddenReadout("unavailable", 1, reason="no such span"),
        ]
    )
    assert metrics.captured_rows.labels("rows")._value.get() == 3
    assert metrics.captured_bytes.labels("rows")._value.get() == 48
    assert metrics.captured_rows.labels("hidden")._value.get() == 0
    assert metrics.dropped.labels("max_shared_bytes")._value.get() == 1
    assert metrics.readouts.labels("hidden", "unavailable")._value.get() == 1


FRONT_END = """
from guard.mia.metrics import engine_metrics
from guard.mia.spec import HiddenCapture, MiaSpec

metrics = engine_metrics()
assert metrics is engine_metrics()
metrics.count_request(MiaSpec(hidden={"h": HiddenCapture(layer=1)}))
metrics.courier_lag.labels("prompt").observe(0.002)
metrics.bank_vectors.set(3)
"""


def test_several_api_servers_are_merged_as_vllm_merges_its_own(tmp_path: Path) -> None:
    """vLLM shows a ``MultiProcessCollector`` of the folder where it runs more than one."""
    for _ in range(2):
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", FRONT_END], env=environment, check=True, timeout=60)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    samples = [
        one for family in text_string_to_metric_families(generate_latest(registry).decode()) for one in family.samples
    ]
    found = {(one.name, *one.labels.values()): one.value for one in samples}
    assert found["mia_requests_total", "readouts"] == 2
    assert found["mia_courier_lag_seconds_count", "prompt"] == 2
    assert found["mia_bank_vectors",] == 3
    assert found["mia_requests_total", "nothing"] == 0
