"""Detectors by kind: our own, and those that other distributions register.

Owns the table of kinds. Another distribution adds one with an entry point in the group ``mia_guard.detectors``: its
name is the kind, its value a function from a model_configs file to a ``Detector`` or a ``TextDetector``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from detectors.base import AnyDetector

GROUP = "mia_guard.detectors"

Builder = Callable[[Path], AnyDetector]


class UnknownDetectorError(LookupError):
    """No detector of that kind; the message lists those there are."""


def _attention_tracker(path: Path) -> AnyDetector:
    from detectors.attention_tracker import AttentionTracker

    return AttentionTracker.load(path)


def _probe(path: Path) -> AnyDetector:
    from detectors.probe import Probe

    return Probe.load(path)


BUILT_IN: dict[str, Builder] = {"attention_tracker": _attention_tracker, "probe": _probe}


def detector_kinds() -> tuple[str, ...]:
    return tuple(sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))}))


def build_detector(kind: str, model_config_path: Path) -> AnyDetector:
    """Build the detector ``kind`` from its file. A built-in kind cannot be replaced from outside.

    Raises ``UnknownDetectorError``, and ``ModelConfigError`` for a file that cannot be used.
    """
    builder = BUILT_IN.get(kind)
    if builder is None:
        points = tuple(entry_points(group=GROUP, name=kind))
        if not points:
            raise UnknownDetectorError(f"no detector of kind {kind!r}; there are: {', '.join(detector_kinds())}")
        builder = points[0].load()
    return builder(model_config_path)
