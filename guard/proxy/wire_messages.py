"""Anthropic's messages: answers that are a list of content blocks, streamed as named events.

Owns this API's bodies. Never decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from guard.policy.conversation import OF_USERS
from guard.proxy.errors import InvalidRequestError
from guard.proxy.other_texts import HEAD, other_texts
from guard.proxy.shown_texts import around, beside_of, documents_unplaced, role_slot, strings, text_slots, unread_files
from guard.proxy.wire import Ending, Fields, Form, Piece, Seen, Slot, as_one, check_messages, event, roles_of

MESSAGES = "/v1/messages"
SPOKEN = ("text", "thinking", "partial_json")
BILLING = "x-anthropic-billing-header"
"""How a text begins that one client adds to its system prompt, and vLLM leaves out."""

RETURNED = ("document", "search_result")
"""Blocks beside results of tools that are no one's words: what was found or handed in."""

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


def _check_served(fields: Fields) -> None:
    """vLLM says a tool's result of an assistant's turn in the assistant's name, and moves a system's message to the
    front unless its template takes it elsewhere: either way nothing is whose these functions say."""
    for i, message in enumerate(fields["messages"]):
        role, content = message["role"], message.get("content")
        if role == "system" and (i > 0 or fields.get("system")):
            where = f"messages[{i}].role"
            raise InvalidRequestError(f"{where}: send what the system says in the field system", where)
        kinds = [one.get("type") for one in content if isinstance(one, dict)] if isinstance(content, list) else []
        if role != "user" and "tool_result" in kinds:
            where = f"messages[{i}].content"
            raise InvalidRequestError(f"{where}: a tool's result belongs into a user's message", where)


def _messages(fields: Fields) -> Iterator[Seen]:
    """Results of tools become messages before their turn's rest."""
    number = 0
    if _has_system(fields):
        yield Seen("system", 0, text_slots(0, fields["system"], fields, "system"), fields["system"])
        number = 1
    for message in fields["messages"]:
        role, content = message["role"], message.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        results = [block for block in blocks if _is_result(block)]
        for block in results:
            shown = block.get("content")
            yield Seen("tool", number, text_slots(number, shown, block, "content"), block)
            number += 1
            for extra in _beside_result(shown):
                yield Seen(extra, number, [])
                number += 1
        said = _is_said(role, content, blocks)
        yield _rest(number if said else OF_USERS, message, blocks, results)
        number += said


def _rest(number: int, message: Fields, blocks: list[Fields], results: list[Fields]) -> Seen:
    """What of a message is no tool's result."""
    taken = {id(block) for block in results}
    rest = [block for block in blocks if id(block) not in taken]
    texts = text_slots(number, message.get("content"), message, "content")
    named = role_slot(number, message)
    slots = [
        *(slot for slot in texts if id(slot.owner) not in taken),
        *(Slot(number, -1, one, "input") for one in rest if one.get("type") == "tool_use" and one.get("input")),
        *([named] if named else []),
    ]
    return Seen(message["role"], number, slots, rest)


def _is_result(block: Fields) -> bool:
    kind = str(block.get("type"))
    return kind.endswith("tool_result") or kind in RETURNED


def _beside_result(shown: Any) -> list[str]:
    """Roles of the messages that vLLM makes of a result's pictures and references, behind the one of its text."""
    parts = [one for one in shown if isinstance(one, dict)] if isinstance(shown, list) else []
    sources = [one.get("source") for one in parts if one.get("type") == "image"]
    pictures = [one for one in sources if not isinstance(one, dict) or one.get("type") != "url" or one.get("url")]
    named = [one for one in parts if one.get("type") == "tool_reference" and (one.get("tool_name") or one.get("name"))]
    return [*(["user"] if pictures else []), *(["tool"] if named else [])]


def _is_said(role: str, content: Any, blocks: list[Fields]) -> bool:
    """Whether vLLM makes a message of what is no tool's result: not of a system's without a text, nor of a user's
    without a text or a picture."""
    if role == "system":
        texts = [content] if isinstance(content, str) else [block.get("text") for block in blocks]
        return any(text and not str(text).startswith(BILLING) for text in texts)
    if role != "user" or not isinstance(content, list):
        return True
    filled = {"text": "text", "image": "source"}
    return any(block.get(filled.get(str(block.get("type")), "")) for block in blocks)


def _has_system(fields: Fields) -> bool:
    """As vLLM, which leaves out blocks that begin so, and no text that is the whole of the prompt."""
    system = fields.get("system")
    if isinstance(system, str):
        return bool(system)
    return any(slot.text and not slot.text.startswith(BILLING) for slot in text_slots(0, system, fields, "system"))


def _beside(fields: Fields) -> list[Slot]:
    # Other providers' models see it.
    left_out = [] if _has_system(fields) else list(strings(-1, fields.get("system")))
    return [*beside_of(_messages(fields)), *left_out, *around(fields)]


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


def _ends(frame: bytes) -> bool:
    return frame.startswith((b"event: message_stop", b"event: error"))


def _usage(ending: Ending) -> Fields:
    """Without what is not known of the prompt: this API always has a usage."""
    prompt = {} if ending.prompt_tokens is None else {"input_tokens": ending.prompt_tokens}
    return {**prompt, "output_tokens": ending.completion_tokens}


def _message(ending: Ending, content: list[Fields], stop: str | None) -> Fields:
    return {
        "id": f"msg_{ending.request_id}", "type": "message", "role": "assistant", "model": ending.model,
        "content": content, "stop_reason": stop, "stop_sequence": None,
        # A message itself has both numbers, whatever is known.
        "usage": {"input_tokens": 0, **_usage(ending)},
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
    check_served=_check_served,
    # vLLM refuses a request that comes to no message.
    roles=lambda fields: roles_of(_messages(fields)) or ("user",),
    slots=lambda fields: [slot for one in _messages(fields) for slot in one.slots],
    beside=_beside,
    unread=unread_files,
    unplaced=documents_unplaced,
    choices=lambda fields: 1,
    limits=("max_tokens",),
    words=_words,
    pieces=_pieces,
    parts=as_one,
    ends=_ends,
    refusal=_refusal,
    refusal_stream=_refusal_stream,
    cut=_cut,
    named_errors=True,
)
