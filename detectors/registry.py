"""Detectors by kind: our own, and those that other distributions register.

Owns the table of kinds. Another distribution adds one with an entry point in the group ``mia_guard.detectors``: its
name is the kind, its value a function from a model_configs file to a ``Detector`` or a ``TextDetector``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Self

from detectors.base import AnyDetector

GROUP = "mia_guard.detectors"

Builder = Callable[[Path], AnyDetector]


class UnknownDetectorError(LookupError):
    """No detector of that kind; the message lists those there are."""

    @classmethod
    def of(cls, kind: str) -> Self:
        return cls(f"no detector of kind {kind!r}; there are: {', '.join(detector_kinds())}")


def _attention_tracker(path: Path) -> AnyDetector:
    from detectors.attention_tracker import AttentionTracker

    return AttentionTracker.load(path)


def _probe(path: Path) -> AnyDetector:
    from detectors.probe import Probe

    return Probe.load(path)


def _h_node(path: Path) -> AnyDetector:
    from detectors.h_node import HNode, read_mia_probe

    return read_mia_probe(path) if path.suffix == ".npz" else HNode.load(path)


def _tool_call_risk(path: Path) -> AnyDetector:
    from detectors.tool_call_risk import ToolCallRisk

    return ToolCallRisk.load(path)


def _science_hallucination(path: Path) -> AnyDetector:
    from detectors.science_hallucination import ScienceHallucination

    return ScienceHallucination.load(path)


def _combination(path: Path) -> AnyDetector:
    from detectors.combination import Combination

    return Combination.load(path)


def _text_baseline(path: Path) -> AnyDetector:
    from detectors.text_baseline import TextBaseline

    return TextBaseline.load(path)


BUILT_IN: dict[str, Builder] = {
    "attention_tracker": _attention_tracker,
    "combination": _combination,
    "h_node": _h_node,
    "probe": _probe,
    "science_hallucination": _science_hallucination,
    "text_baseline": _text_baseline,
    "tool_call_risk": _tool_call_risk,
}


READ_THE_END = frozenset(("attention_tracker", "probe", "tool_call_risk"))
"""Built-in kinds that read the prompt's last token, unless their file says otherwise."""


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
            raise UnknownDetectorError.of(kind)
        builder = points[0].load()
    return builder(model_config_path)
