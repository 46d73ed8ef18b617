"""The probes that detectors want the engine to run, as the files that an engine is started with.

Owns the way from detectors to a folder for ``additional_config.mia.probe_folder``. What a probe's file holds is the
aperture's (``guard.mia.probes``).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors.numpy import save

from detectors.base import AnyDetector, CapturePlan, Detector, EngineProbe, SecondPassDetector
from guard.whole_file import write_whole


def plan_of(detector: AnyDetector) -> CapturePlan:
    """What an engine must be able to capture for a detector of any kind."""
    if isinstance(detector, SecondPassDetector):
        return detector.plan_of_pass
    return detector.plan() if isinstance(detector, Detector) else CapturePlan()


def engine_probes(detectors: Iterable[AnyDetector]) -> dict[str, EngineProbe]:
    """Every probe once, by name."""
    return {probe.name: probe for detector in detectors for probe in plan_of(detector).probes.values()}


def write_probes(probes: Iterable[EngineProbe], folder: Path) -> None:
    """Write ``NAME.safetensors`` for each. Names say the content, so that a file that is there is the right one."""
    folder.mkdir(parents=True, exist_ok=True)
    for probe in probes:
        path = folder / f"{probe.name}.safetensors"
        if not path.is_file():
            tensors = {"weight": probe.weight.copy(), "bias": probe.bias.copy()}
            write_whole(path, save(tensors, metadata={"layer": str(probe.layer)}))
