"""What ``guard policy lint`` can say of calibrations without a model: of files that a policy names, and of detectors
that need none.

Owns which these are, and the words of what is left for ``--model``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from detectors.base import AnyDetector, Detector
from guard.policy.absent import AbsentDetector
from guard.policy.bound import bind, build_alone, config_path
from guard.policy.calibrated import calibration_remarks
from guard.policy.compiled import compile_rules
from guard.policy.loading import LoadedPolicy


@dataclass
class Alone:
    """``kinds``: of detectors whose files depend on the model; ``reads``: whether another reads inside it; ``steers``:
    whether a rule does. All of the policies that were checked."""

    model_configs: Path
    kinds: set[str] = field(default_factory=set)
    reads: bool = False
    steers: bool = False

    def check(self, loaded: LoadedPolicy) -> list[str]:
        """Remarks. Raises ``PolicyError``, as ``bind`` with what can be built."""
        detectors = build_alone(loaded, self.model_configs)
        absent = {name for name, one in detectors.items() if isinstance(one, AbsentDetector)}
        self.kinds |= {detectors[name].kind for name in absent}
        self.reads |= any(isinstance(one, Detector) for name, one in detectors.items() if name not in absent)
        self.steers |= any(rule.steer for rule in loaded.policy.rules)
        missing = list(self._missing(loaded, detectors))
        if any(rule.gate is not None and rule.gate.detector in absent for rule in loaded.policy.rules):
            # A gate needs to know what its detector reads.
            compile_rules(loaded, {name: one.thresholds for name, one in detectors.items()})
            return missing
        return [*missing, *calibration_remarks(bind(loaded, detectors), None)]

    def _missing(self, loaded: LoadedPolicy, detectors: Mapping[str, AnyDetector]) -> Iterator[str]:
        for name, use in loaded.policy.detectors.items():
            if not isinstance(detectors[name], AbsentDetector):
                continue
            if use.config is not None:
                yield f"detector {name}: {config_path(loaded, name, '', self.model_configs)} is not there"
            elif not any((self.model_configs / use.kind).glob("*.json")):
                yield f"detector {name}: no model has a file of {use.kind} in {self.model_configs}"

    @property
    def unchecked(self) -> str:
        """What is left; empty when nothing is."""
        kinds = f"files of {', '.join(sorted(self.kinds))}, with their named thresholds and spans" if self.kinds else ""
        found = [
            kinds,
            "layers, heads and width of what is read inside" if self.reads else "",
            "steering vectors" if self.steers else "",
        ]
        return "; ".join(filter(None, found))
