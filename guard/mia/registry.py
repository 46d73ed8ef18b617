"""Analyzers by name: those that come with the aperture, and those that a user registers.

Owns the table. Loads an analyzer of ours, and with it torch, only when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar, Protocol

from guard.mia.compat import CompatError


class Analyzer(Protocol):
    """What an analyzer can do. Made with ``cls(hook_dir, layer_to_heads)``: where runs were saved, heads by layer."""

    def analyze(self, analyzer_spec: Any, run_id: str | None = None, probes: Any = None) -> Any: ...


_OURS = {
    "hidden_states": "guard.mia.analyzers.hidden_states:HiddenStatesAnalyzer",
    "attn_tracker": "guard.mia.analyzers.attn_tracker:AttentionTrackerAnalyzer",
}


class PluginRegistry:
    """The process's analyzers."""

    _registered: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_analyzer(cls, name: str, analyzer_class: Any) -> None:
        """Make ``analyzer_class`` available as ``name``, also in place of one of ours."""
        cls._registered[name] = analyzer_class

    @classmethod
    def get(cls, name: str) -> Any:
        """The class of that name. Raises ``CompatError`` that lists the names there are."""
        if name in cls._registered:
            return cls._registered[name]
        if name not in _OURS:
            raise CompatError(f"there is no analyzer {name!r}; there are {', '.join(cls.list_analyzers())}")
        module, attribute = _OURS[name].split(":")
        return getattr(importlib.import_module(module), attribute)

    @classmethod
    def list_analyzers(cls) -> list[str]:
        return sorted({*_OURS, *cls._registered})


def make_analyzer(name: str | None, hook_dir: Any, layer_to_heads: Any) -> Analyzer:
    """An analyzer by its name. Raises ``CompatError``."""
    if name is None:
        raise CompatError("there is no analyzer: pass analyzer_name")
    analyzer: Analyzer = PluginRegistry.get(name)(hook_dir, layer_to_heads)
    return analyzer
