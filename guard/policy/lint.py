"""``guard policy lint``: check policy files without an engine.

With a model's calibrations at hand, thresholds, spans and steering vectors are checked too; the schema alone otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from guard.policy.bound import bind, build_detectors
from guard.policy.loading import load_policy
from guard.policy.support import refuse_unsupported
from guard.policy.yaml_file import PolicyError


def lint(
    paths: Sequence[Path],
    say: Callable[[str], None] = print,
    *,
    config_key: str | None = None,
    model_configs: Path | None = None,
) -> int:
    """Check every file and report each; returns 1 when any cannot be used, else 0."""
    failed = 0
    for path in paths:
        try:
            loaded = load_policy(path)
            refuse_unsupported(loaded)
            if config_key is not None and model_configs is not None:
                vectors = {path.stem for path in (model_configs / "steering" / config_key).glob("*.safetensors")}
                bind(loaded, build_detectors(loaded, config_key, model_configs), vectors)
        except PolicyError as error:
            say(str(error))
            failed = 1
        else:
            say(f"{path}: ok ({loaded.policy.name}@{loaded.hash[:12]}, {len(loaded.policy.rules)} rules)")
    return failed
