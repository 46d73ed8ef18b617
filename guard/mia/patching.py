"""The one way in which vLLM's methods are wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a method that calls ``wrapper(original, self, ...)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(owner, name, method)
