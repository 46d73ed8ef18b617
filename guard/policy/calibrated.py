"""Whether a policy's detectors were calibrated for what they run on: this model's weights, each other, and windows.

Owns the words of what does not fit. It is no mistake that stops a guard: a detector may be kept on purpose for a model
that was tuned a little further.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from detectors.base import TextDetector
from detectors.combination import Combination
from detectors.model_config import ModelConfig, Threshold, fingerprint_of
from guard.model_weights import quick_weights_sha256
from guard.policy.bound import BoundPolicy
from guard.policy.conditions import bounds_of


def calibration_remarks(policy: BoundPolicy, model: Path | None) -> list[str]:
    """model: its folder; None where it is not known here, or not on this machine. Weights are compared where their
    hash is known or quick to compute."""
    sha256 = quick_weights_sha256(model) if model is not None else None
    return [*_other_weights(policy, sha256), *_other_inputs(policy), *_without_windows(policy)]


def _other_weights(policy: BoundPolicy, sha256: str | None) -> Iterator[str]:
    for name, detector in policy.detectors.items():
        config = getattr(detector, "config", None)
        calibration = config.calibration if isinstance(config, ModelConfig) else None
        if sha256 is None or calibration is None or isinstance(detector, TextDetector):
            continue  # what reads text alone does not depend on the model
        if calibration.model_sha256 != sha256:
            yield (
                f"detector {name}: its {detector.kind} was calibrated on other weights than the model has (SHA-256 "
                f"{calibration.model_sha256[:12]}, not {sha256[:12]}): its scores and thresholds were not measured "
                f"here; guard calibrate {detector.kind} measures them"
            )


def _other_inputs(policy: BoundPolicy) -> Iterator[str]:
    for name, detector in policy.detectors.items():
        if not isinstance(detector, Combination):
            continue
        for kind, of in policy.uses[name].inputs.items():
            fitted_to = detector.config.params.inputs[kind].fitted_to
            found = fingerprint_of(policy.detectors[of])
            if fitted_to is not None and found is not None and fitted_to != found:
                yield (
                    f"detector {name}: its combination was fitted to another {kind} than {of} is ({fitted_to}, not "
                    f"{found}): guard calibrate {' '.join(detector.inputs)} combination fits them together"
                )


def _without_windows(policy: BoundPolicy) -> Iterator[str]:
    """The highest of many scores is higher than one: a threshold that was measured without windows says too little."""
    named: dict[str, dict[str, None]] = {}
    for condition in (compiled.rule.when for compiled in policy.rules):
        for bound in bounds_of(condition) if condition is not None else ():
            names = (one for one in (bound.at_least, bound.below) if isinstance(one, str))
            named.setdefault(bound.detector, {}).update(dict.fromkeys(names))
    for name, detector in policy.detectors.items():
        config = getattr(detector, "config", None)
        if getattr(detector, "windows", None) is None or not isinstance(config, ModelConfig):
            continue
        if without := [one for one in named.get(name, {}) if not _with_windows(config, one)]:
            yield (
                f"detector {name}: its {detector.kind} has windows, and {', '.join(without)} "
                f"{'was' if len(without) == 1 else 'were'} measured without them: more benign requests reach that, "
                "long ones above all; guard eval says what it does with windows, and guard calibrate threshold sets it "
                "from your traffic"
            )


def _with_windows(config: ModelConfig, name: str) -> bool:
    """Whether a named threshold was set on scores with windows, as far as the file tells."""
    calibration = config.calibration
    if calibration is None or name not in calibration.thresholds:
        return True
    threshold: Threshold = calibration.thresholds[name]
    if threshold.scores_of:
        return threshold.scores_of == config.fingerprint
    # Without attacks it was set from a ledger, by a version that did not write whose scores these were.
    return threshold.held_out_attack == 0 or "--windows" in calibration.command.split()
