"""What a provider's refusal, or its silence, comes to for the client.

Owns which words of a provider's leave: those of its own error, in OpenAI's form. litellm's words and addresses do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from guard.proxy.come_back import when_to_come_back

UNREACHED, UNREADABLE = "the provider of this model cannot be reached", "the provider's answer cannot be read"
SILENT = "the provider did not answer in time"
LEADS_AWAY = "the provider's address leads elsewhere, where nothing is sent"
OURS = "the provider of this model cannot be asked"
NO_WORDS = "the provider refused the request"
STRAYED = "this API of the model's provider would ask an address that is not configured"
LEFT_OUT = "the provider of this model would not get this as it is here, so nothing was sent; leave it out"
NO_FORM = "this request has no form that the provider of this model takes"

ABOUT_OUR_KEY = (401, 403)

Kind = Literal["told", "refused", "unavailable"]

NAMES = ("message", "type", "param", "code")


@dataclass(frozen=True)
class Failure:
    """``error``: OpenAI's object. ``kind``: ``told``, in the provider's words; ``refused`` before anything was sent; or
    ``unavailable``."""

    status: int
    error: Mapping[str, Any]
    kind: Kind
    headers: Mapping[str, str] = field(default_factory=dict)


def unavailable(message: str, status: int = 502) -> Failure:
    error = {"message": message, "type": "server_error", "param": None, "code": "upstream_unavailable"}
    return Failure(status, error, "unavailable")


def refused(message: str, param: str | None = None) -> Failure:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": "invalid_request"}
    return Failure(400, error, "refused")


def answered(status: int, headers: Mapping[str, str], body: bytes | None) -> Failure:
    """A provider's answer that is no success."""
    if 300 <= status < 400:
        return unavailable(LEADS_AWAY)
    if status in ABOUT_OUR_KEY:
        return unavailable(OURS)
    if not 400 <= status < 600:
        return unavailable(UNREADABLE)
    told = {name: value for name, value in (error_in(body) or {"message": NO_WORDS}).items() if value is not None}
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return Failure(status, {"type": kind, "param": None, "code": None, **told}, "told", when_to_come_back(headers))


def error_in(raw: bytes | None) -> dict[str, Any] | None:
    """The error that a body says; None for what says none."""
    value = _object(raw or b"")
    error = value.get("error")
    if isinstance(error, dict):
        # Gemini calls the kind a status.
        return {"message": NO_WORDS, "type": error.get("status"), **_named(error)}
    for told in (error, value.get("message"), value.get("detail")):
        if isinstance(told, str):
            return {**_named(value), "message": told}
    return None


def error_in_stream(raw: bytes) -> dict[str, Any] | None:
    """The last of those that events say."""
    found = None
    for line in raw.splitlines():
        data = line.removeprefix(b"data:")
        if b"error" in data:
            value = _object(data)
            found = error_in(data) if value.get("error") or value.get("type") == "error" else found
    return found


def _object(raw: bytes) -> dict[str, Any]:
    """Empty for what is no JSON object; some put one into a list."""
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, dict) else {}


def _named(error: Mapping[str, Any]) -> dict[str, Any]:
    return {name: error[name] for name in NAMES if isinstance(error.get(name), str | int) and error[name] != ""}


def untaken(message: str, fields: Sequence[str]) -> Failure:
    """litellm says which fields a provider does not take in words of its own: the names are enough."""
    names = [name for name in fields if f"'{name}'" in message]
    if not names:
        return refused(NO_FORM)
    return refused(f"{', '.join(names)}: not taken by the provider that serves this model", names[0])
