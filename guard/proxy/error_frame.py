"""The frame with which a model server ends a stream that it cannot finish: how it is told from others, and what of it a
client gets.

Owns what counts as such an error. A field that is called so and is empty is none.
"""

from __future__ import annotations

import json
from typing import Any

from guard.proxy.wire import DATA, with_data

TOLD = ("type", "message", "code", "param", "status")
"""What an error says, and nothing that an answer would."""

BESIDE = ("type", "message", "code", "param", "sequence_number", "request_id")
"""Fields beside the error itself, and of those that are not inside a field of their own."""

UNTOLD = "the model server ended its answer with an error"


def error_frame(raw: bytes) -> bytes | None:
    """The frame as far as it is an error; None for every other. One that is nothing else stays as it came."""
    if b"error" not in raw:
        return None
    named = any(line.startswith(b"event:") and line[len(b"event:") :].strip() == b"error" for line in raw.split(b"\n"))
    try:
        data: Any = json.loads(b"\n".join(line[len(DATA) :] for line in raw.split(b"\n") if line.startswith(DATA)))
    except (ValueError, RecursionError):
        data = None
    if not named and not (isinstance(data, dict) and (data.get("error") or data.get("type") == "error")):
        return None
    told = _told(data) if isinstance(data, dict) else {"error": {"message": UNTOLD}}
    return raw if told == data else with_data(raw, told)


def _told(data: dict[str, Any]) -> dict[str, Any]:
    error = data.get("error")
    beside = _plain(data, BESIDE)
    if isinstance(error, dict):
        return {**beside, "error": _plain(error, TOLD)}
    return {**beside, "error": error} if isinstance(error, str) else beside or {"error": {"message": UNTOLD}}


def _plain(data: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name in names and not isinstance(value, dict | list)}
