"""Whether a policy's detectors were calibrated for what they run on: this model's weights, and each other.

Owns the words of what does not fit. It is no mistake that stops a guard: a detector may be kept on purpose for a model
that was tuned a little further.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from detectors.base import TextDetector
from detectors.combination import Combination
from detectors.model_config import ModelConfig, fingerprint_of
from guard.model_weights import quick_weights_sha256
from guard.policy.bound import BoundPolicy


def calibration_remarks(policy: BoundPolicy, model: Path | None) -> list[str]:
    """model: its folder; None where it is not known here, or not on this machine. Weights are compared where their
    hash is known or quick to compute."""
    sha256 = quick_weights_sha256(model) if model is not None else None
    return [*_other_weights(policy, sha256), *_other_inputs(policy)]


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
