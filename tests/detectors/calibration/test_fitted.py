"""Writing fitted detectors: a run that is killed at any time leaves one that loads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from detectors.calibration.fitted import Fitted, Job, write
from detectors.model_config import ModelInfo
from detectors.probe import BIAS, WEIGHT, Params, Probe, ProbeConfig

JOB = Job(Path("unused"), "tiny", "tiny", ("probe",), 0, "guard calibrate")


def probe(value: float) -> Fitted:
    raw = save({WEIGHT: np.full(4, value, np.float32), BIAS: np.zeros(1, np.float32)})
    params = Params.model_validate(
        {
            "layers": (1,),
            "hidden_size": 4,
            "weights": "tiny.safetensors",
            "weights_sha256": hashlib.sha256(raw).hexdigest(),
        }
    )
    return Fitted(ProbeConfig(model_info=ModelInfo(name="tiny"), params=params), {"tiny.safetensors": raw})


def loaded(out: Path) -> float:
    return float(Probe.load(out / "probe" / "tiny.json").weight.reshape(-1)[0])


def test_a_refit_replaces_what_was_there_and_leaves_no_files_behind(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0, 3.0, 4.0):
        paths = write({"probe": probe(value)}, JOB, tmp_path)
        assert loaded(tmp_path) == value
        assert sorted(paths) == sorted((tmp_path / "probe").iterdir())
        # Whatever the weights' file is called, it is the same detector.
        assert Probe.load(tmp_path / "probe" / "tiny.json").config.fingerprint == probe(value).config.fingerprint


@pytest.mark.parametrize("last", range(1, 9))
def test_a_run_that_is_killed_leaves_the_old_detector_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    write({"probe": probe(1.0)}, JOB, tmp_path)
    steps = 0

    class KilledError(BaseException):
        pass

    def counted(name: str) -> None:
        real = getattr(Path, name)

        def step(self: Path, *given: Any, **named: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps >= last:  # once dead, nothing else happens
                raise KilledError
            return real(self, *given, **named)

        monkeypatch.setattr(Path, name, step)

    for name in ("write_bytes", "replace", "unlink"):
        counted(name)
    try:
        write({"probe": probe(2.0)}, JOB, tmp_path)
    except KilledError:
        assert last <= 7
    monkeypatch.undo()
    assert loaded(tmp_path) in (1.0, 2.0)
    write({"probe": probe(5.0)}, JOB, tmp_path)
    assert loaded(tmp_path) == 5.0
