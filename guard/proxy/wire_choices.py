"""Chat completions and completions: answers that are a list of choices.

Owns these two APIs' bodies. Never decides anything.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from functools import partial
from typing import Any

from guard.policy.measuring import Unplaced
from guard.proxy.errors import InvalidRequestError
from guard.proxy.other_texts import HEAD, MADE_OF, other_texts
from guard.proxy.shown_texts import AS_TOKENS, around, documents_unplaced, strings, text_slots, unread_files
from guard.proxy.wire import (
    Ending,
    Fields,
    Form,
    Piece,
    Slot,
    check_messages,
    event,
    prompt_pieces,
    token_pieces,
    whole_number,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RAW = Unplaced("a raw prompt has no template: the client chooses where it ends, and what of it is whose")
"""Detectors are calibrated where a template lets the answer begin: a raw prompt that ends a token sooner or later, or
with the beginning of an answer, has another reading there."""

PROMPT_ROLE = "prompt"
"""Of no API: what of a raw prompt is a user's and what a tool's result is not known, so it is meant as both."""

FINISH = "content_filter"
DONE_FRAME = b"data: [DONE]\n\n"
THOUGHTS = ("reasoning", "reasoning_content")
SPOKEN = ("content", *THOUGHTS, "refusal")


def _check_prompt(fields: Fields) -> None:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not all(isinstance(token, int) for token in prompt):
        if len(prompt) != 1:
            raise InvalidRequestError("several prompts cannot be guarded in one request; send one each", "prompt")
        prompt = prompt[0]
    if not isinstance(prompt, str | list) or not prompt:
        raise InvalidRequestError("prompt must be a text or a list of tokens, and not empty", "prompt")
    if fields.get("prompt_embeds") is not None:
        raise InvalidRequestError("prompt_embeds cannot be guarded", "prompt_embeds")


def _check_messages(fields: Fields) -> None:
    check_messages(fields)
    for i, message in enumerate(fields["messages"]):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "prompt_embeds":
                raise InvalidRequestError("prompt_embeds cannot be guarded", f"messages[{i}].content")


def _slots_of_messages(fields: Fields) -> list[Slot]:
    return [slot for i, message in enumerate(fields["messages"]) for slot in _slots_of_message(i, message)]


def _slots_of_message(i: int, message: Fields) -> list[Slot]:
    calls = message.get("tool_calls")
    called = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [
        *text_slots(i, message.get("content"), message, "content"),
        *(Slot(i, -1, message, name) for name in THOUGHTS if isinstance(message.get(name), str)),
        # Arguments may be JSON in a text, or JSON itself: the engine takes both.
        *(Slot(i, -1, one, "arguments") for one in called if isinstance(one, dict) and one.get("arguments")),
    ]


def beside_texts(fields: Fields) -> list[Slot]:
    """What else of a chat's messages templates may show."""
    return [
        slot
        for i, message in enumerate(fields["messages"])
        for slot in strings(i, message, _slots_of_message(i, message))
    ]


def _slots_of_prompt(fields: Fields) -> list[Slot]:
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        return [Slot(0, 0, fields, "prompt")]
    return [Slot(0, 0, prompt, 0)] if isinstance(prompt[0], str) else []


def _unread_prompt(fields: Fields) -> str:
    prompt = fields["prompt"]
    return "" if isinstance(prompt, str) or isinstance(prompt[0], str) else AS_TOKENS


def _number_of_choices(fields: Fields) -> int:
    return max(1, whole_number(fields.get("n")) or 1)


def _pieces(value: Any) -> list[Piece]:
    choices = value.get("choices") or ()
    first = int(choices[0]["index"]) if choices else 0
    read = [*(piece for choice in choices for piece in _pieces_of(choice)), *prompt_pieces(first, value)]
    return read + other_texts(first, value, read, known={*HEAD, "choices"})


def _pieces_of(choice: Fields) -> list[Piece]:
    index, traces = int(choice["index"]), ((choice, "logprobs"), (choice, "token_ids"))
    said = choice.get("delta") or choice.get("message") or {}
    found = [("text", choice, "text"), *((name, said, name) for name in SPOKEN)]
    for i, call in enumerate(said.get("tool_calls") or ()):
        called, at = call.get("function") or {}, call.get("index", i)
        found += [(f"tool.{at}.{name}", called, name) for name in ("name", "arguments")]
        found += [(f"tool.{at}.custom.{name}", call.get("custom") or {}, name) for name in ("name", "input")]
    called = said.get("function_call") or {}
    found += [(f"function.{name}", called, name) for name in ("name", "arguments")]
    found.append(("audio.transcript", said.get("audio") or {}, "transcript"))
    for i, detail in enumerate(said.get("reasoning_details") or ()):
        found += [(f"detail.{detail.get('index', i)}.{name}", detail, name) for name in ("text", "summary")]
    # The stop word is what the model said last, and no part of the text.
    found.append(("text" if isinstance(choice.get("text"), str) else "content", choice, "stop_reason"))
    there = [one for one in found if _is_text(one[1].get(one[2]), one[2])]
    tokens = _tokens(choice) if there else 0
    pieces = [
        Piece(index, channel, owner, key, tokens if i == 0 else 0, traces=traces)
        for i, (channel, owner, key) in enumerate(there)
    ]
    pieces += token_pieces(index, choice, "logprobs")
    if pieces and not there:
        pieces[0] = replace(pieces[0], tokens=_tokens(choice))
    pieces += prompt_pieces(index, choice)
    return pieces + other_texts(index, choice, pieces)


def _is_text(value: Any, name: str) -> bool:
    """What is made of parts is read part by part; a tool's arguments may be JSON that is no text yet."""
    return bool(value) and (isinstance(value, str) or (isinstance(value, dict) and name in MADE_OF))


def _tokens(choice: Fields) -> int:
    logprobs = choice.get("logprobs") or {}
    shown = logprobs.get("content") or logprobs.get("tokens") or choice.get("token_ids") or ()
    return max(1, len(shown))


def hide_token_ids(fields: Fields, answer: Any) -> bool:
    """Take token ids out of an answer where they may go further than its text, as what they spell is not known here:
    past a stop word or token, and in a chat to whatever the engine's parsers leave out. Whether there were any."""
    stops = bool(fields.get("stop") or fields.get("stop_token_ids"))
    names = [
        *(("token_ids",) if stops or "messages" in fields else ()),
        *(("logprobs", "prompt_logprobs") if fields.get("return_tokens_as_token_ids") else ()),
        *(("stop_reason",) if fields.get("stop_token_ids") else ()),
    ]
    hidden = False
    choices = (answer.get("choices") or () if isinstance(answer, dict) else ()) if names else ()
    for choice in choices:
        for name in names:
            if choice.get(name) is not None and not isinstance(choice[name], str):
                choice[name], hidden = None, True
    return hidden


def _words(channel: str) -> bool:
    return channel in ("content", "text")


def _parts(data: Fields) -> list[tuple[int | None, Fields]]:
    choices = data.get("choices") or []
    if len(choices) < 2:
        return [(int(choices[0]["index"]) if choices else None, data)]
    beside = {name: value for name, value in data.items() if name != "choices"}
    # Each its own copy: what is taken out of one is not yet out of the others.
    return [(int(choice["index"]), {**copy.deepcopy(beside), "choices": [choice]}) for choice in choices]


def _ends(frame: bytes) -> bool:
    return frame.startswith((b"data: [DONE]", b"data:[DONE]"))


def _usage(ending: Ending) -> Fields:
    """Empty where it is not known."""
    prompt, completion = ending.prompt_tokens, ending.completion_tokens
    if prompt is None:
        return {}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}}


def _head(ending: Ending, chat: bool, streamed: bool) -> Fields:
    kind = ("chat.completion.chunk" if streamed else "chat.completion") if chat else "text_completion"
    begun = ending.first or {}
    return {
        "id": begun.get("id") or f"{'chatcmpl' if chat else 'cmpl'}-{ending.request_id}",
        "object": kind,
        "created": begun.get("created") or int(time.time()),
        "model": begun.get("model") or ending.model,
    }


def _choice(index: int, said: Fields, finish: str | None) -> Fields:
    return {"index": index, **said, "logprobs": None, "finish_reason": finish}


def _refusal(chat: bool, ending: Ending, text: str) -> Fields:
    said: Fields = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choices = [_choice(i, said, FINISH) for i in range(ending.choices)]
    return {**_head(ending, chat, False), "choices": choices, **_usage(ending)}


def _refusal_stream(chat: bool, ending: Ending, text: str) -> bytes:
    said: Fields = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
    head = _head(ending, chat, True)
    words = [event({**head, "choices": [_choice(i, said, None)]}) for i in range(ending.choices)]
    return b"".join(words) + _cut(chat, ending)


def _cut(chat: bool, ending: Ending) -> bytes:
    head = _head(ending, chat, True)
    nothing: Fields = {"delta": {}} if chat else {"text": ""}
    frames = [event({**head, "choices": [_choice(i, nothing, FINISH)]}) for i in range(ending.choices)]
    if ending.wants_usage and (usage := _usage(ending)):
        frames.append(event({**head, "choices": [], **usage}))
    return b"".join(frames) + DONE_FRAME


chat_form = Form(
    route=CHAT,
    check=_check_messages,
    roles=lambda fields: tuple(message["role"] for message in fields["messages"]),
    slots=_slots_of_messages,
    beside=lambda fields: [*beside_texts(fields), *around(fields)],
    unread=unread_files,
    unplaced=documents_unplaced,
    choices=_number_of_choices,
    limits=("max_completion_tokens", "max_tokens"),
    words=_words,
    pieces=_pieces,
    parts=_parts,
    ends=_ends,
    refusal=partial(_refusal, True),
    refusal_stream=partial(_refusal_stream, True),
    cut=partial(_cut, True),
)
completions_form = Form(
    route=COMPLETIONS,
    check=_check_prompt,
    roles=lambda fields: (PROMPT_ROLE,),
    slots=_slots_of_prompt,
    beside=around,
    unread=_unread_prompt,
    unplaced=lambda fields: RAW,
    choices=_number_of_choices,
    limits=("max_tokens",),
    words=_words,
    pieces=_pieces,
    parts=_parts,
    ends=_ends,
    refusal=partial(_refusal, False),
    refusal_stream=partial(_refusal_stream, False),
    cut=partial(_cut, False),
)
