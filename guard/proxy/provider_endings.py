"""How each choice of a provider's answer ended, in the provider's own word, and whether a stream was one at all.

Owns reading this from the bytes that the provider sent: litellm has an ending for every answer, also for one that had
none, and passes over what it cannot read.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

NAMES = ("finish_reason", "finishReason", "stop_reason", "stopReason", "done_reason", "completionReason")
"""Fields that say how an answer ended."""

LISTS = ("choices", "candidates")
"""Fields with one item for each choice."""

BLOCKED = "content_filter"
DONE = "stop"

SAID_BY_MODELS = frozenset(
    (
        *("content", "message", "parts", "text", "tool_calls", "function_call", "functionCall", "content_block"),
        *("input", "args", "arguments", "parameters"),
    )
)
"""Fields below which a model has the say."""

SAYS_ONE = re.compile(rb'"(?:' + "|".join(NAMES).encode() + rb'|blockReason|done)"\s*:\s*(?:"[^"]|true)')
"""A line that may have one. In a text, the quotes would be escaped."""

UNFRAMED = re.compile(rb'"(?:' + "|".join(NAMES).encode() + rb')"\s*:\s*"([^"\\]+)"')

INNER = re.compile(rb'"bytes"\s*:\s*"([A-Za-z0-9+/=]+)"')
"""Events within events, as AWS has them."""

BINARY = ("vnd.", "octet-stream", "protobuf")
"""In content types of streams that have no lines."""

KEPT_BYTES = 1 << 16
"""Of such a stream's end."""

OF_EVENTS = (b"event", b"id", b"retry", b"")
"""Fields of server-sent events beside their data; the last is a comment."""

LAST = b"[DONE]"

MAX_LINE_BYTES = 1 << 26


def endings_in(value: Any) -> dict[int, str]:
    """Of one event, or a whole answer; index -> word."""
    if isinstance(value, list):
        return {index: word for one in value for index, word in endings_in(one).items()}
    if not isinstance(value, dict):
        return {}
    for name in LISTS:
        if isinstance(held := value.get(name), list) and held:
            numbered = [(_index(one, i), _word(one)) for i, one in enumerate(held) if isinstance(one, dict)]
            return {index: word for index, word in numbered if word is not None}
    feedback = value.get("promptFeedback")
    if isinstance(feedback, dict) and feedback.get("blockReason"):
        return {0: BLOCKED}
    word = _word(value)
    if word is None and value.get("done") is True:
        word = DONE
    return {} if word is None else {0: word}


def _index(choice: Mapping[str, Any], place: int) -> int:
    index = choice.get("index", place)
    return index if isinstance(index, int) else place


def _word(held: Mapping[str, Any]) -> str | None:
    waiting: list[Any] = [held]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            # Beside its own, vLLM has the stop word under the name that others use.
            name = next((name for name in NAMES if name in one), "")
            if isinstance(word := one.get(name), str) and word:
                return word
            waiting += [inner for name, inner in one.items() if name not in SAID_BY_MODELS]
        elif isinstance(one, list):
            waiting += one
    return None


class Endings:
    """Of one stream, as its bytes come. ``odd``: a part of it is none that a stream has."""

    def __init__(self, content_type: str) -> None:
        self._has_lines = not any(name in content_type for name in BINARY)
        self._waiting = bytearray()
        self._found: dict[int, str] = {}
        self.odd = False

    def add(self, chunk: bytes) -> None:
        self._waiting += chunk
        if not self._has_lines:
            del self._waiting[:-KEPT_BYTES]
        elif b"\n" in chunk:
            *lines, rest = bytes(self._waiting).split(b"\n")
            self._waiting = bytearray(rest)
            for line in lines:
                self._read(line.strip())
        self.odd |= len(self._waiting) > MAX_LINE_BYTES

    def found(self) -> dict[int, str]:
        """Once it has ended."""
        if self._has_lines:
            self._read(bytes(self._waiting).strip())
            self._waiting.clear()
            return self._found
        inner = b"".join(base64.b64decode(one + b"==") for one in INNER.findall(self._waiting))
        words = UNFRAMED.findall(inner or self._waiting)
        return {0: words[-1].decode("ascii", "replace")} if words else {}

    def _read(self, line: bytes) -> None:
        """Either a JSON object, or a field of an event."""
        name, _, data = line.partition(b":")
        is_event = name == b"data"
        if not is_event and not line.startswith(b"{"):
            self.odd |= name not in OF_EVENTS
            return
        told = data.strip() if is_event else line
        if told in (b"", LAST):
            return
        try:
            value: Any = json.loads(told)
        except (ValueError, RecursionError):
            self.odd = True
            return
        if not is_event and any(one in value for one in LISTS):
            # A whole answer, where a stream was asked for: of that, litellm reads no word.
            self.odd = True
        elif SAYS_ONE.search(told):
            self._found.update(endings_in(value))
