"""The probes that detectors want the engine to run, as the files that an engine is started with.

Owns the way from detectors to a folder for ``additional_config.mia.probe_folder``. What a probe's file holds is the
aperture's (``guard.mia.probes``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from safetensors.numpy import save

from detectors.base import AnyDetector, CapturePlan, Detector, EngineProbe, SecondPassDetector, WeightsDetector
from guard.whole_file import write_whole


def plan_of(detector: AnyDetector) -> CapturePlan:
    """What an engine must be able to capture for a detector of any kind."""
    if isinstance(detector, SecondPassDetector):
        return detector.plan_of_pass
    return detector.plan() if isinstance(detector, Detector) else CapturePlan()


def computed_by(detector: AnyDetector, probes: Collection[str]) -> AnyDetector:
    """The detector whose weights an engine applies that was started with ``probes``, by name, where these are all of
    them; otherwise states leave the engine."""
    if not isinstance(detector, WeightsDetector):
        return detector
    there = detector.computed(in_engine=True)
    return (
        there if all(one.name in probes for one in there.plan().probes.values()) else detector.computed(in_engine=False)
    )


def engine_probes(detectors: Iterable[AnyDetector]) -> dict[str, EngineProbe]:
    """Every probe that an engine could compute for these, once, by name."""
    able = (one.computed(in_engine=True) if isinstance(one, WeightsDetector) else one for one in detectors)
    return {probe.name: probe for one in able for probe in plan_of(one).probes.values()}


def write_probes(probes: Iterable[EngineProbe], folder: Path) -> None:
    """Write ``NAME.safetensors`` for each. Names say the content, so that a file that is there is the right one."""
    folder.mkdir(parents=True, exist_ok=True)
    for probe in probes:
        path = folder / f"{probe.name}.safetensors"
        if not path.is_file():
            tensors = {"weight": probe.weight.copy(), "bias": probe.bias.copy()}
            write_whole(path, save(tensors, metadata={"layer": str(probe.layer)}))
