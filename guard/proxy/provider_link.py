"""What crosses between the proxy and the process of litellm beside bodies: whom to ask, and whose an error is.

Owns the names of these headers. The key of a provider is in one, on a socket that nobody else may open.
"""

from __future__ import annotations

import msgspec

MODEL_HEADER = "x-guard-model"
"""A ``Model``, as JSON."""

FAILURE_HEADER = "x-guard-failure"
"""A ``provider_error.Kind``."""

PING, CHECK = "/ping", "/check"
"""The second takes a list of ``Model``, and says of each what it cannot be asked for, or null."""

USAGE = b": guard-usage "
"""Begins a comment in a stream, with what the provider has told of its usage as JSON, whether the client wants it or
not."""


class Model(msgspec.Struct, frozen=True):
    """``name``: for litellm. ``may_ask``: the addresses that it may be asked at; none: litellm knows one. ``via``: the
    guards that a request came through, where they are told."""

    name: str
    api_base: str | None
    api_key: str | None
    via: str | None
    timeout_s: float
    may_ask: tuple[str, ...] = ()
