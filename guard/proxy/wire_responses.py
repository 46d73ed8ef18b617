"""OpenAI's responses: answers that are a list of output items, streamed as named events.

Owns this API's bodies. Never decides anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from guard.proxy.errors import InvalidRequestError
from guard.proxy.other_texts import HEAD, other_texts
from guard.proxy.shown_items import ShownItems
from guard.proxy.shown_texts import around, beside_of, documents_unplaced, strings, text_slots, unread_files
from guard.proxy.wire import TOKENS, Ending, Fields, Form, Piece, Seen, Slot, as_one, event, roles_of, token_pieces

RESPONSES = "/v1/responses"
ELSEWHERE = ("previous_response_id", "previous_input_messages", "prompt", "conversation")
"""Fields that put text into the prompt which is not in the request."""

ECHOED = HEAD | {
    *("instructions", "tools", "tool_choice", "text", "metadata", "user", "reasoning", "prompt", "truncation"),
    *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "previous_response_id", "conversation"),
    *("billing", "moderation"),
}
"""Of a response: what the request said, and what the answer as a whole is."""

CALLED = ("mcp", "web_search_preview", "code_interpreter", "container")
"""Kinds of tools that the engine calls itself: what they say is in the prompt of its next turn."""

SERVED = ("message", "reasoning", "function_call", "function_call_output")
"""Kinds of items of which vLLM makes messages. Any other fails there, or is read as whatever message its other fields
make of it."""

RETURNED = ("output", "outputs", "results", "result", "tools", "error")
"""Fields of a call in which what it returned stands too."""

ENDED = ("text", "arguments", "refusal", "code", "input")
"""Fields in which an event at the end of a text has all of it."""

SUMMARIES = ("content", "summary")
CLOSING = (b"response.completed", b"response.incomplete", b"response.failed")


def _check(fields: Fields) -> None:
    given = fields.get("input")
    if not isinstance(given, str | list) or not given:
        raise InvalidRequestError("input must be a text or a list of items, and not empty", "input")
    for i, item in enumerate(given if isinstance(given, list) else ()):
        if not isinstance(item, dict):
            raise InvalidRequestError(f"input[{i}] must be an object", f"input[{i}]")
        if not isinstance(item.get("role", ""), str):
            raise InvalidRequestError(f"input[{i}].role must be a string", f"input[{i}].role")
        if item.get("type") == "item_reference" or not item.keys() & {"type", "role", "content"}:
            raise InvalidRequestError("an item elsewhere cannot be guarded: send the item itself", f"input[{i}]")
    tools = fields.get("tools")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type") in CALLED:
            raise InvalidRequestError("a tool that the model server calls itself cannot be guarded", f"tools[{i}].type")
    for name in ELSEWHERE:
        if fields.get(name) is not None:
            raise InvalidRequestError(f"{name} cannot be guarded: send the conversation as input", name)
    if fields.get("background") not in (None, False):
        raise InvalidRequestError("background cannot be guarded: its answer is fetched later", "background")
    if isinstance(given, list) and given[-1].get("status") in ("in_progress", "incomplete"):
        raise InvalidRequestError("an answer to go on with cannot be guarded", f"input[{len(given) - 1}].status")
    if not isinstance(fields.get("instructions"), str | None):
        raise InvalidRequestError("instructions must be a string", "instructions")


def _check_served(fields: Fields) -> None:
    given = fields["input"]
    for i, item in enumerate(given if isinstance(given, list) else ()):
        kind, where = item.get("type", "message"), f"input[{i}]"
        if kind not in SERVED:
            raise InvalidRequestError(
                f"{where}.type: the model server takes {', '.join(SERVED)}; send what a tool returned as "
                "function_call_output",
                f"{where}.type",
            )
        if kind != "message" and "role" in item:
            raise InvalidRequestError(f"{where}.role: an item of type {kind} has none", f"{where}.role")


def _messages(fields: Fields) -> Iterator[Seen]:
    """The engine joins reasoning and calls of one turn. What a call has in it of its result is a tool's."""
    number = -1
    if fields.get("instructions"):
        number += 1
        yield Seen("system", number, [Slot(number, 0, fields, "instructions")])
    given = fields["input"]
    if isinstance(given, str):
        yield Seen("user", number + 1, [Slot(number + 1, 0, fields, "input")])
        return
    before, filled = "", set[str]()
    for item in given:
        kind, role, name = _kind(item)
        joins = role == before == "assistant" and (kind == "call" or (kind not in filled and _says(kind, item)))
        if not joins:
            number, filled = number + 1, set()
        filled.add(kind)
        before = role
        returned = [one for one in RETURNED if item.get(one)] if kind == "call" else []
        places = tuple(Slot(number, 0, item, one) for one in returned)
        yield Seen(role, number, text_slots(number, item.get(name), item, name), item, places)
        if returned:
            number, before = number + 1, "tool"
            texts = [slot for one in returned for slot in text_slots(number, item[one], item, one)]
            yield Seen("tool", number, texts, [item[one] for one in returned if not isinstance(item[one], str)])


def _kind(item: Fields) -> tuple[str, str, str]:
    """What an item is to the model: its part of a message, the message's role, and where its text stands."""
    kind = str(item.get("type", "message"))
    if kind == "reasoning":
        return "reasoning", "assistant", "content" if item.get("content") else "summary"
    if kind.endswith("_output"):
        return "result", "tool", "output"
    if kind.endswith("_call") or kind == "mcp_list_tools":
        return "call", "assistant", "arguments" if kind == "function_call" else "input"
    return "text", str(item.get("role", "user" if kind == "message" else kind)), "content"


def _says(kind: str, item: Fields) -> bool:
    """Whether the engine finds a text in an answer of the past, without which it makes it a message of its own."""
    content = item.get("content")
    first = content[0] if isinstance(content, list) and content else None
    return kind != "text" or isinstance(content, str) or (isinstance(first, dict) and first.get("text") is not None)


def _slots(fields: Fields) -> list[Slot]:
    return [slot for one in _messages(fields) for slot in one.slots]


def _pieces(value: Any) -> list[Piece]:
    read = _read(value)
    # A whole answer is what the last event of a stream has inside.
    whole = value.get("object") == "response"
    read += other_texts(0, value if whole else value.get("response"), read, known=ECHOED)
    at = f"{value.get('output_index')}.{value.get('type')}.{value.get('content_index')}"
    return read if whole else read + other_texts(0, value, read, at=at, known={"response"})


def _read(value: Any) -> list[Piece]:
    """The texts that this API is known to have."""
    kind = str(value.get("type", ""))
    if kind.endswith(".delta"):
        shown = token_pieces(0, value, "logprobs", at=f".{_channel(value, kind)}")
        if isinstance(value.get("delta"), str) and value["delta"]:
            shown = [Piece(0, _channel(value, kind), value, "delta", traces=((value, "logprobs"),)), *shown]
        tokens = max(1, len(value.get("logprobs") or ()))
        return [replace(shown[0], tokens=tokens), *shown[1:]] if shown else []
    found: list[tuple[str, Any, Any]] = []
    if kind:
        ended = [name for name in ENDED if _filled(value, name)]
        found += [(_channel(value, kind) + (f".{name}" if i else ""), value, name) for i, name in enumerate(ended)]
        # vLLM tells the name of a call again beside its arguments.
        found.append((f"{_channel(value, kind)}.name", value, "name"))
    found += _of_part(_channel(value, kind), value.get("part") or {})
    found += _of_item(str(value.get("output_index")), value.get("item") or {})
    answer = value if value.get("object") == "response" else value.get("response") or {}
    for i, item in enumerate(answer.get("output") or ()):
        found += _of_item(str(i), item)
    tokens = 1 if value.get("object") == "response" else 0
    pieces = [
        Piece(0, channel, owner, name, tokens if i == 0 else 0, whole=True, traces=_traces(owner))
        for i, (channel, owner, name) in enumerate(one for one in found if _filled(one[1], one[2]))
    ]
    owners = {(id(owner), name): (channel, owner) for channel, owner, name in found if name == "text"}
    tokens_of = [
        piece
        for channel, owner in owners.values()
        for piece in token_pieces(0, owner, "logprobs", at=f".{channel}", whole=True)
    ]
    return pieces + tokens_of


def _traces(owner: Any) -> tuple[tuple[Any, str], ...]:
    return ((owner, "logprobs"),) if isinstance(owner, dict) else ()


def _filled(owner: Any, key: Any) -> bool:
    return bool(owner.get(key) if isinstance(owner, dict) else owner[key])


def _channel(value: Fields, kind: str) -> str:
    part = value.get("content_index", value.get("summary_index", 0))
    return f"{value.get('output_index')}.{kind.rpartition('.')[0]}.{part}"


def _of_item(at: str, item: Fields) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = [
        (f"{at}.item.{name}", item, name) for name in ("arguments", "name", "input", "code")
    ]
    for name in ("action", "output", "outputs", "results", "queries", "error"):
        if isinstance(item.get(name), str):
            found.append((f"{at}.item.{name}", item, name))
        written = (
            slot for slot in strings(0, item.get(name)) if name == "action" or isinstance(slot.owner[slot.key], str)
        )
        found += [(f"{at}.item.{name}.{i}", slot.owner, slot.key) for i, slot in enumerate(written)]
    for list_name in SUMMARIES:
        for j, part in enumerate(item.get(list_name) or ()):
            found += _of_part(f"{at}.{list_name}.{j}", part)
    return found


def _of_part(channel: str, part: Fields) -> list[tuple[str, Fields, str]]:
    return [(f"{channel}.{name}", part, name) for name in ("text", "refusal")]


def _words(channel: str) -> bool:
    if channel.startswith(TOKENS):
        return False
    return ".output_text." in f"{channel}." or (".content." in channel and channel.endswith(".text"))


def _ends(frame: bytes) -> bool:
    return frame.startswith(tuple(b"event: " + name for name in CLOSING))


def _answer(ending: Ending, output: list[Fields]) -> Fields:
    begun = (ending.first or {}).get("response") or {}
    return {
        "id": f"resp_{ending.request_id}", "object": "response", "created_at": int(time.time()), "model": ending.model,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None, "instructions": None,
        "metadata": None, "temperature": None, "top_p": None, **begun,
        "status": "incomplete", "incomplete_details": {"reason": "content_filter"}, "output": output,
        "usage": _usage(ending),
    }  # fmt: skip


def _usage(ending: Ending) -> Fields | None:
    """None where it is not known."""
    prompt, completion = ending.prompt_tokens, ending.completion_tokens
    if prompt is None:
        return None
    return {
        "input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion,
        "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


def _said(ending: Ending, text: str) -> Fields:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": f"msg_{ending.request_id}", "type": "message", "role": "assistant", "status": "incomplete",
        "content": content,
    }  # fmt: skip


def _refusal(ending: Ending, text: str) -> Fields:
    return _answer(ending, [_said(ending, text)])


def _refusal_stream(ending: Ending, text: str) -> bytes:
    item = _said(ending, text)
    at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    part = item["content"][0]
    begun = {**_answer(ending, []), "status": "in_progress", "incomplete_details": None, "usage": None}
    events: list[Fields] = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []},
        {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.incomplete", "response": _answer(ending, [item])},
    ]
    return b"".join(event({**one, "sequence_number": i}, one["type"]) for i, one in enumerate(events))


def _cut(ending: Ending) -> bytes:
    items = ending.items or ShownItems()
    ends = [*items.endings(), {"type": "response.incomplete", "response": _answer(ending, items.items())}]
    number = int((ending.last or {}).get("sequence_number", -1)) + 1
    return b"".join(event({**one, "sequence_number": i}, one["type"]) for i, one in enumerate(ends, number))


responses_form = Form(
    route=RESPONSES,
    check=_check,
    check_served=_check_served,
    roles=lambda fields: roles_of(_messages(fields)),
    slots=_slots,
    beside=lambda fields: [*beside_of(_messages(fields)), *around(fields)],
    unread=unread_files,
    unplaced=documents_unplaced,
    choices=lambda fields: 1,
    limits=("max_output_tokens",),
    words=_words,
    pieces=_pieces,
    parts=as_one,
    ends=_ends,
    refusal=_refusal,
    refusal_stream=_refusal_stream,
    cut=_cut,
    has_items=True,
)
