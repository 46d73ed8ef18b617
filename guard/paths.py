"""Where the guard keeps files of its own on this machine: a cache that may be deleted, and state such as logs.

Follows the XDG base directories. Creates nothing; never touches the working folder.
"""

from __future__ import annotations

import os
from pathlib import Path

APPLICATION = "mia-guard"


def cache_folder() -> Path:
    """Downloaded and converted models; deleting it costs a download."""
    return _xdg("XDG_CACHE_HOME", ".cache") / APPLICATION


def state_folder() -> Path:
    """Logs of the engines that the guard starts."""
    return _xdg("XDG_STATE_HOME", ".local/state") / APPLICATION


def _xdg(variable: str, default: str) -> Path:
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else Path.home() / default
