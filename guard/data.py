"""Finds the files that ship with the guard: in a checkout beside the packages, in a wheel inside them.

Owns nothing else; what the files mean is known to those who read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["policies", "model_configs", "dashboards"]

_PACKAGE = Path(__file__).resolve().parent


def data_folder(kind: Kind) -> Path:
    """The folder ``kind``. A checkout wins, so that an editable install reads the files that one edits."""
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / kind).is_dir():
        return checkout / kind
    return _PACKAGE / "data" / kind


def default_policy() -> Path:
    return data_folder("policies") / "default.yaml"


def steering_folder(model_configs: Path, config_key: str) -> Path:
    """Where the steering vectors of one model lie; the folder need not exist."""
    return model_configs / "steering" / config_key
