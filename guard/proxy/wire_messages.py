"""Anthropic's messages: answers that are a list of content blocks, streamed as named events.

Owns this API's bodies. Never decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from guard.proxy.errors import InvalidRequestError
from guard.proxy.other_texts import HEAD, other_texts
from guard.proxy.wire import (
    Ending,
    Fields,
    Form,
    Piece,
    Slot,
    around,
    check_messages,
    event,
    role_slot,
    strings,
    text_slots,
    unread_files,
)

MESSAGES = "/v1/messages"
SPOKEN = ("text", "thinking", "partial_json")
BILLING = "x-anthropic-billing-header"
"""How a text begins that one client adds to its system prompt, and vLLM leaves out."""

FINISH = "refusal"


def _check(fields: Fields) -> None:
    check_messages(fields)
    for i, message in enumerate(fields["messages"]):
        waiting = [message.get("content")]
        while waiting:
            content = waiting.pop()
            for block in content if isinstance(content, list) else ():
                if isinstance(block, dict):
                    if not isinstance(block.get("type", ""), str):
                        name = f"messages[{i}].content"
                        raise InvalidRequestError(f"{name}: the type of each block must be a string", name)
                    waiting.append(block.get("content"))


def _messages(fields: Fields) -> Iterator[tuple[str, list[Slot], Any]]:
    """Role, texts and JSON of each message that the model sees: results of tools become messages before their turn's
    rest."""
    number = 0
    if _has_system(fields):
        yield "system", text_slots(0, fields["system"], fields, "system"), fields["system"]
        number = 1
    for message in fields["messages"]:
        role, content = message["role"], message.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        results = [block for block in blocks if role == "user" and block.get("type") == "tool_result"]
        for block in results:
            shown = block.get("content")
            yield "tool", text_slots(number, shown, block, "content"), block
            number += 1
            kinds = [one.get("type") for one in shown if isinstance(one, dict)] if isinstance(shown, list) else []
            for kind, extra in (("image", "user"), ("tool_reference", "tool")):
                if kind in kinds:
                    yield extra, [], None
                    number += 1
        if role == "user" and blocks and len(results) == len(blocks):
            continue
        calls = [
            Slot(number, -1, block, "input")
            for block in blocks
            if block.get("type") == "tool_use" and block.get("input")
        ]
        rest = [block for block in blocks if role != "user" or block.get("type") != "tool_result"]
        named = role_slot(number, message)
        yield role, [*text_slots(number, content, message, "content"), *calls, *([named] if named else [])], rest
        number += 1


def _has_system(fields: Fields) -> bool:
    """As vLLM, which leaves out blocks that begin so, and no text that is the whole of the prompt."""
    system = fields.get("system")
    if isinstance(system, str):
        return bool(system)
    return any(slot.text and not slot.text.startswith(BILLING) for slot in text_slots(0, system, fields, "system"))


def _beside(fields: Fields) -> list[Slot]:
    numbered = enumerate(_messages(fields))
    inside = [slot for i, (_, slots, one) in numbered for slot in strings(i, one, slots)]
    # Other providers' models see it.
    left_out = [] if _has_system(fields) else list(strings(-1, fields.get("system")))
    return [*inside, *left_out, *around(fields)]


def _pieces(value: Any) -> list[Piece]:
    found: list[tuple[str, Fields, str]] = []
    delta, begun, at = value.get("delta") or {}, value.get("content_block") or {}, value.get("index")
    found += [(f"{at}.{name}", delta, name) for name in SPOKEN]
    found += [(f"{at}.{name}", begun, name) for name in (*SPOKEN, "name", "input")]
    for i, block in enumerate(value.get("content") or ()):
        found += [(f"{i}.{name}", block, name) for name in (*SPOKEN, "name", "input")]
    # The stop word is what the model said last, and in no block.
    found += [("stop_sequence", owner, "stop_sequence") for owner in (delta, value)]
    there = [one for one in found if _is_text(one[1].get(one[2]), one[2])]
    read = [Piece(0, channel, owner, name, 1 if i == 0 else 0) for i, (channel, owner, name) in enumerate(there)]
    begins = value.get("message") or {}
    beside = other_texts(0, begins, read, at="message", known=HEAD)
    return [*read, *beside, *other_texts(0, value, read, at=str(at), known={*HEAD, "message"})]


def _is_text(value: Any, name: str) -> bool:
    """What is made of parts is read part by part; a tool's input is JSON."""
    return bool(value) and (isinstance(value, str) or (isinstance(value, dict) and name == "input"))


def _words(channel: str) -> bool:
    return channel.endswith(".text")


def _parts(data: Fields) -> list[tuple[int | None, Fields]]:
    return [(0, data)]


def _ends(frame: bytes) -> bool:
    return frame.startswith((b"event: message_stop", b"event: error"))


def _usage(ending: Ending) -> Fields:
    return {"input_tokens": ending.prompt_tokens, "output_tokens": ending.completion_tokens}


def _message(ending: Ending, content: list[Fields], stop: str | None) -> Fields:
    return {
        "id": f"msg_{ending.request_id}", "type": "message", "role": "assistant", "model": ending.model,
        "content": content, "stop_reason": stop, "stop_sequence": None, "usage": _usage(ending),
    }  # fmt: skip


def _refusal(ending: Ending, text: str) -> Fields:
    return _message(ending, [{"type": "text", "text": text}], FINISH)


def _refusal_stream(ending: Ending, text: str) -> bytes:
    begun: list[Fields] = [
        {"type": "message_start", "message": _message(ending, [], None)},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
    ]
    return b"".join(event(one, one["type"]) for one in begun) + _end(ending)


def _cut(ending: Ending) -> bytes:
    last = ending.last or {}
    opened = last.get("type") in ("content_block_start", "content_block_delta")
    close = {"type": "content_block_stop", "index": last.get("index", 0)}
    return (event(close, close["type"]) if opened else b"") + _end(ending)


def _end(ending: Ending) -> bytes:
    delta = {"stop_reason": FINISH, "stop_sequence": None}
    stop = event({"type": "message_delta", "delta": delta, "usage": _usage(ending)}, "message_delta")
    return stop + event({"type": "message_stop"}, "message_stop")


messages_form = Form(
    route=MESSAGES,
    check=_check,
    roles=lambda fields: tuple(role for role, _, _ in _messages(fields)),
    slots=lambda fields: [slot for _, slots, _ in _messages(fields) for slot in slots],
    beside=_beside,
    unread=unread_files,
    choices=lambda fields: 1,
    limits=("max_tokens",),
    words=_words,
    pieces=_pieces,
    parts=_parts,
    ends=_ends,
    refusal=_refusal,
    refusal_stream=_refusal_stream,
    cut=_cut,
    named_errors=True,
)
