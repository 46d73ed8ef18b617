"""How many tokens a request used: what the model server tells of it, and what is charged where it does not tell.

Owns reading a usage from answers of every API, and the bounds that stand in for one that never came. A bound is never
below what a client could have used, so that leaving early, or not asking for a usage, is no way around a limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from guard.mia.results import Readouts
from guard.proxy.body import NUMBERS_OF_CHOICES, GuardedRequest
from guard.proxy.shown_texts import media_in
from guard.proxy.wire import Form, Texts, whole_number
from guard.telemetry.record import MAX_MODEL_CHARACTERS, RequestRecord

MAX_CHARGED_ANSWER = 4096
"""Tokens charged at most for one choice of an answer that nobody saw the end of. Without a bound, a client that asked
for a million tokens and left after one would be in debt for days."""

HALF_TOKENS = bytes(range(ord("a"), ord("z") + 1)) + bytes(range(ord("A"), ord("Z") + 1)) + b" "
"""Bytes of which vocabularies put two or more into a token even where they make no words."""

SAYS = re.compile(
    rb'"(?:content|text|delta|reasoning|reasoning_content|refusal|thinking|arguments|input|partial_json|transcript)"'
    rb'\s*:\s*"[^"]'
)
"""In a frame of any API: a part of an answer that is not empty. In a text, the quotes would be escaped."""

NOT_SAID = frozenset(("role", "type", "id", "index", "finish_reason", "logprobs"))
"""Fields of a choice that are no words of the answer."""

PER_MESSAGE = 8
"""Tokens that a template puts around a message, about."""

PER_MEDIUM = 16_384
"""Tokens of a picture, a sound, a video or a file. How many it really has only the model's own processor knows: this is
the most that Qwen2-VL's makes of a picture by default (its model card), of a family that takes more than others do."""


def _usage_in(places: list[dict[str, Any]]) -> tuple[int | None, int | None]:
    """Tokens of prompt and answer that a whole answer's JSON, or an event's, tells; None for what it does not tell."""
    for place in places:
        usage = place.get("usage")
        if isinstance(usage, dict):
            prompt, completion = (
                next((usage[name] for name in names if _is_count(usage.get(name))), None)
                for names in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
            )
            # An embedding has no answer, and its usage names none.
            return prompt, 0 if completion is None and "prompt_tokens" in usage else completion
    return None, None


def _note_model(record: RequestRecord, places: list[dict[str, Any]]) -> None:
    """What the answer calls the model that gave it."""
    for place in places:
        if isinstance(model := place.get("model"), str):
            record.answered_by = model[:MAX_MODEL_CHARACTERS]


def _places(value: Any) -> list[dict[str, Any]]:
    """Where the APIs put what is about the whole answer."""
    if not isinstance(value, dict):
        return []
    return [one for one in (value, value.get("response"), value.get("message")) if isinstance(one, dict)]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def count_whole(record: RequestRecord, body: bytes) -> None:
    """A whole answer that was no error: what it tells of its usage. Without any, its length bounds it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    places = _places(value)
    _note_model(record, places)
    prompt, completion = _usage_in(places)
    record.prompt_tokens = record.prompt_tokens if prompt is None else prompt
    record.completion_tokens, record.complete = completion, True
    of_text = not record.most_frame_tokens
    record.most_completion_tokens = said_tokens(value) if of_text else min(record.most_completion_tokens, len(body))


def count_event(record: RequestRecord, value: Any) -> None:
    """One event of a stream: some tell their usage at the end, some all along."""
    places = _places(value)
    _note_model(record, places)
    prompt, completion = _usage_in(places)
    record.prompt_tokens = record.prompt_tokens if prompt is None else prompt
    if completion is not None:
        record.completion_tokens = max(completion, record.completion_tokens or 0)


def count_frame(record: RequestRecord, raw: bytes) -> None:
    """The same of a frame as it came, and whether it says something. But for the first, one without the word is not
    parsed: in a text, the quotes would be escaped."""
    record.seen_tokens += SAYS.search(raw) is not None
    if record.frames and b'"usage"' not in raw:
        return
    count_event(record, _data(raw))


def _data(raw: bytes) -> Any:
    """What an event says; None for what is no JSON."""
    lines = b"\n".join(line[len(b"data:") :] for line in raw.split(b"\n") if line.startswith(b"data:"))
    try:
        return json.loads(lines)
    except (ValueError, RecursionError):
        return None


def count_readouts(record: RequestRecord, readouts: Sequence[Readouts]) -> None:
    """Readouts tell how long the prompt is, which some APIs say at an answer's end alone."""
    if record.prompt_tokens is None:
        record.prompt_tokens = next((one.prompt_tokens for one in readouts if one.prompt_tokens), None)


def came(record: RequestRecord, raw: bytes) -> None:
    """One more frame of a stream. It has about one token, or as many as the client had the engine put into one, but no
    more than bytes. Another provider's has as many as its text."""
    record.frames += 1
    of_text = not record.most_frame_tokens
    record.frame_tokens += said_tokens(_data(raw)) if of_text else min(record.most_frame_tokens, len(raw))


def said_tokens(value: Any) -> int:
    """At most, of what the choices of an answer say, or those of a frame."""
    choices = value.get("choices") if isinstance(value, dict) else None
    return text_tokens(_said(choices))


def _said(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in NOT_SAID:
                yield from _said(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _said(inner)
    elif isinstance(value, str):
        yield value


def text_tokens(texts: Iterable[str]) -> int:
    """At most, of texts."""
    encoded = [text.encode("utf-8", "backslashreplace") for text in texts]
    whole = sum(len(text.translate(None, HALF_TOKENS)) for text in encoded)
    half = sum(len(text) for text in encoded) - whole
    return whole + -(-half // 2)


def expect(
    record: RequestRecord,
    request: GuardedRequest[Texts],
    before: GuardedRequest[Texts] | None = None,
    *,
    elsewhere: bool = False,
) -> None:
    """A request is sent to a model server: until its answer tells more, this is what it may use. What whole answers
    before it used, which a policy did not want, stays charged. ``before``: what was sent last; of another prompt, or
    for another model, its tokens say nothing. ``elsewhere``: to another provider, whose frames have any number of
    tokens."""
    if record.complete:
        record.earlier_tokens = record.tokens
    if before is not None and before is not request:
        record.prompt_tokens = None
    record.completion_tokens, record.complete = None, False
    record.frames, record.frame_tokens, record.seen_tokens = 0, 0, 0
    interval = max(1, whole_number(request.fields.get("stream_interval")) or 1)
    record.most_frame_tokens = 0 if elsewhere else interval
    record.answered_by = None
    # Of a stream what came is known, frame by frame; an embedding generates nothing.
    record.most_completion_tokens = 0
    if isinstance(request.form, Form) and not request.streamed:
        record.most_completion_tokens = most_completion_tokens(request.form, request.fields)


def expect_nothing(record: RequestRecord) -> None:
    """It was refused, or did not reach a model server: nothing was used."""
    record.prompt_tokens, record.completion_tokens, record.most_completion_tokens = 0, 0, 0


def left_at_prompt(record: RequestRecord) -> None:
    """It was closed as soon as its prompt was read."""
    record.completion_tokens, record.most_completion_tokens = 0, 0


def settle(record: RequestRecord, request: GuardedRequest[Texts] | None, times: int = 1) -> None:
    """At a request's end: a prompt that nobody counted is charged by its texts. ``request``: what was sent, ``times``
    times; None when nothing was."""
    if request is not None and record.prompt_tokens is None:
        record.most_prompt_tokens = times * most_prompt_tokens(request)


def most_completion_tokens(form: Form, fields: dict[str, Any]) -> int:
    """Of all choices of an answer together. A limit that this API does not read bounds nothing."""
    given = [whole_number(fields[name]) for name in form.limits if fields.get(name) is not None][:1]
    choices = max(whole_number(fields.get(name)) or 1 for name in NUMBERS_OF_CHOICES)
    prompts = fields.get("prompt")
    several = isinstance(prompts, list) and any(isinstance(one, str | list) for one in prompts)
    most = max(0, min([MAX_CHARGED_ANSWER, *(number for number in given if number is not None)]))
    return most * max(1, choices) * (len(prompts) if isinstance(prompts, list) and several else 1)


def most_prompt_tokens(request: GuardedRequest[Texts]) -> int:
    """Of the texts, of pictures and the like, and of prompts that are given as tokens."""
    texts = text_tokens(text for _, _, text in request.texts)
    tokens = sum(1 for name in ("prompt", "input") for _ in _integers(request.fields.get(name)))
    media = PER_MEDIUM * media_in(request.fields)
    return texts + tokens + media + PER_MESSAGE * len(request.roles)


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for one in value:
            yield from _integers(one)
    elif isinstance(value, int):
        yield value
