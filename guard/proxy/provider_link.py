"""What crosses between the proxy and the process of litellm beside bodies: whom to ask, and whose an error is.

Owns the names of these headers. The key of a provider is in one, on a socket that nobody else may open.
"""

from __future__ import annotations

import msgspec

MODEL_HEADER = "x-guard-model"
"""A ``Model``, as JSON."""

FAILURE_HEADER = "x-guard-failure"
"""A ``provider_error.Kind``."""

PING = "/ping"


class Model(msgspec.Struct, frozen=True):
    """``name``: for litellm. ``via``: the guards that a request came through, where they are told."""

    name: str
    api_base: str | None
    api_key: str | None
    via: str | None
    timeout_s: float
