"""The aperture: captures and steers model internals per request inside vLLM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guard.mia.client import MiaClient
    from guard.mia.llm import MiaLLM
    from guard.mia.registry import PluginRegistry

__all__ = ["MiaClient", "MiaLLM", "PluginRegistry"]

_HOMES = {
    "MiaClient": "guard.mia.client",
    "MiaLLM": "guard.mia.llm",
    "PluginRegistry": "guard.mia.registry",
}


def __getattr__(name: str) -> Any:
    """Loaded when asked for: proxies and detectors import this package for its specs alone."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
