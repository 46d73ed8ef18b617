"""Errors of a model server in place of an answer, or of its rest: how a stream's is told from other frames, and what of
one a client gets where rules judge answers.

Owns what counts as such an error; a field that is called so and is empty is none. Its words are the model server's own,
and may quote what the model wrote (a parser's message does): no rule reads them, so they do not leave. Those about a
request do; an answer beside them, or in their place, does not.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from guard.proxy.wire import DATA, answer_json, compact

UNTOLD = "the model server ended its answer with an error"

SERVER_ERROR = "server_error"
"""The type of an error that names none, as OpenAI calls it."""

KINDS = ("type", "code", "param", "status")
"""What an error says in one word or number."""

WORDS = ("error", "message", "detail")
"""Where the words of an error may be."""

BESIDE = ("type", "sequence_number", "request_id")
"""Fields beside the error itself that clients read."""

WORD = re.compile(r"[A-Za-z0-9_.\[\]-]{0,64}")


@dataclass(frozen=True)
class EngineError:
    """``told``: what of it a client gets, as a frame or a body. ``said``: all of it, for whoever may keep texts."""

    told: bytes
    said: str = field(repr=False)


def error_frame(raw: bytes) -> EngineError | None:
    """None for a frame of a stream that is no error."""
    if b"error" not in raw:
        return None
    named = any(line.startswith(b"event:") and line[len(b"event:") :].strip() == b"error" for line in raw.split(b"\n"))
    text = b"\n".join(line[len(DATA) :] for line in raw.split(b"\n") if line.startswith(DATA))
    data = _object(text)
    if not named and not (data.get("error") or data.get("type") == "error"):
        return None
    head = b"event: error\n" if named else b""
    told = head + b"data: " + compact(_told(data, named=named)) + b"\n\n"
    return EngineError(told, text.decode("utf-8", "replace"))


def error_body(body: bytes) -> EngineError:
    """Of a whole answer whose status says that it is an error."""
    return EngineError(compact(_told(_object(body))), body.decode("utf-8", "replace"))


def refusal_body(body: bytes) -> bytes:
    """Of a whole answer whose status says that something is wrong with the request: as it is, where it has nothing but
    an error; else what of it is one. In our words where nothing is."""
    try:
        data: Any = answer_json(body)
    except (ValueError, RecursionError):
        data = None
    told = _words(data)
    if isinstance(data, dict) and (inner := _words(data.get("error"))):
        told["error"] = inner
    if not told.keys() & {*WORDS}:
        return error_body(body).told
    return body if told == data else compact(told)


def _words(error: Any) -> dict[str, Any]:
    if not isinstance(error, dict):
        return {}
    words = {name: error[name] for name in WORDS if isinstance(error.get(name), str)}
    return {**_plain(error, (*KINDS, *BESIDE, "object")), **words}


def _object(text: bytes) -> dict[str, Any]:
    """Empty for what is no JSON object."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _told(data: dict[str, Any], *, named: bool = False) -> dict[str, Any]:
    """In the shape that it has: OpenAI's, beside which Anthropic's clients read a type; or, without ``error``, that of
    the responses' events."""
    beside = _plain(data, BESIDE)
    error = data.get("error")
    if not error and "message" in data:
        return {**beside, **_plain(data, KINDS), "message": UNTOLD}
    kinds = _plain(error, KINDS) if isinstance(error, dict) else {}
    told = {"message": UNTOLD, "type": SERVER_ERROR, "param": None, "code": None, **kinds}
    return {**({"type": "error"} if named else {}), **beside, "error": told}


def _plain(data: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: data[name] for name in names if name in data and _is_plain(data[name])}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int) or (isinstance(value, str) and WORD.fullmatch(value) is not None)
