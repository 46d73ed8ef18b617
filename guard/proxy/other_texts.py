"""Texts of an answer that stand where no API's own reading of it looks: in fields that are new, a provider's own, or
meant for something else.

Owns what in an answer is no text: what says which answer this is, kinds in one word, ids that a machine made, and bytes
in base64. Every other string is one, whatever its field is called, so that no field passes unread. Numbers are where a
model wrote them: counts, times and places are the server's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from guard.proxy.shown_texts import KINDS
from guard.proxy.wire import Piece, is_number

HEAD = frozenset(("id", "object", "created", "created_at", "model", "system_fingerprint", "service_tier", "provider"))
"""Of an answer as a whole: which it is. No model writes there."""

WORDS = KINDS | {"role", "object", "reason", "format", "phase", "severity", "caller", "service_tier", "inference_geo"}
"""Fields that say in one word what something is."""

ENDED = frozenset(("finish_reason", "native_finish_reason", "stop_reason"))
ENDS = frozenset(
    (
        *("stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "repetition"),
        *("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal", "eos", "completed"),
        *("model_context_window_exceeded", "compaction", "safety", "recitation"),
    )
)
"""Why an answer ended, and the words for it; any other word there is read."""

WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}")

OPAQUE = frozenset(
    (
        "encrypted_content",
        "signature",
        "thought_signature",
        "data",
        "b64_json",
        "partial_image_b64",
        "result",
        "routed_experts",
    )
)
"""Fields for bytes; and what is no base64 there is read."""

NOISE = frozenset(("obfuscation",))
"""Random letters that a provider adds so that nobody can tell lengths."""

MADE_OF = frozenset(("input", "arguments", "parsed"))
"""Fields whose objects and lists a model made up, names and all: each is one text."""

WRITTEN = MADE_OF | {
    "content",
    "text",
    "refusal",
    "reasoning",
    "reasoning_content",
    "thinking",
    "transcript",
    "summary",
}
"""Fields in which a number is one that a model wrote."""

LOGPROBS = frozenset(("logprobs", "prompt_logprobs"))
SPELT = frozenset(("content", "refusal", "tokens", "top_logprobs"))
"""Of logprobs; these are read as what they spell."""

BASE64 = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")
DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,[A-Za-z0-9+/_-]*={0,2}")
ID = re.compile(
    r"(?:(?:chatcmpl|cmpl|tool|call|msg|resp|rs|fc|toolu|srvtoolu|ws|fs|ci|mcp|mcpo|mcpl|lsh|cu|ig|ctc|req|gen|run)[-_])*"
    r"(?:[A-Za-z0-9]{0,3}|[0-9a-f]{8,64}|[0-9a-f]{8}(?:-[0-9a-f]{4,12}){1,4}|(?=(?:[A-Za-z]*\d){3})[0-9A-Za-z]{16,64})"
)
"""As servers make them up. Some make one of what the model wrote: the name of a tool, say."""


def other_texts(
    choice: int, value: Any, read: Iterable[Piece], *, at: str = "", known: Collection[str] = ()
) -> list[Piece]:
    """All strings inside ``value`` that no piece of ``read`` has, and numbers that a model wrote. ``at``: tells this
    place from others like it; ``known``: fields of ``value`` itself that hold none."""
    taken = {(id(piece.owner), piece.key) for piece in read if piece.spelt is None}
    return [
        Piece(choice, f"beside:{at}{path}:", owner, key) for path, owner, key in _strings(value, "", taken, set(known))
    ]


def _strings(
    value: Any, path: str, taken: Collection[tuple[int, Any]], known: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    inside = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, inner in inside:
        if (id(value), key) in taken or key in known:
            continue
        # Parts of a list come one by one in a stream, and say themselves which they are.
        place = inner.get("index", key) if isinstance(key, int) and isinstance(inner, dict) else key
        if isinstance(inner, str):
            if inner and not _is_no_text(key, inner):
                yield f"{path}.{place}", value, key
        elif (key in WRITTEN and is_number(inner)) or (key in MADE_OF and isinstance(inner, dict | list)):
            if inner not in ({}, []):
                yield f"{path}.{place}", value, key
        elif isinstance(inner, dict) or (isinstance(inner, list) and key not in LOGPROBS):
            yield from _strings(inner, f"{path}.{place}", taken, SPELT if key in LOGPROBS else ())


def _is_no_text(key: Any, text: str) -> bool:
    if not isinstance(key, str):
        return DATA_URL.fullmatch(text) is not None
    return (
        key in NOISE
        or (key in ENDED and text.lower() in ENDS)
        or (key in WORDS and WORD.fullmatch(text) is not None)
        or ((key == "id" or key.endswith("_id")) and ID.fullmatch(text) is not None)
        or (key in OPAQUE and BASE64.fullmatch(text) is not None)
        or DATA_URL.fullmatch(text) is not None
    )
