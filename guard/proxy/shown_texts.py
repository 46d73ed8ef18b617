"""What of a request a chat template may show: the texts of messages, and every string and number beside them.

Owns which fields say how a message is built, which hold pictures and files, and which texts stand outside of all
messages. How each API builds its messages is in ``wire_choices``, ``wire_responses`` and ``wire_messages``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from guard.policy.conversation import DOCUMENTS, KNOWN_ROLES, OF_USERS
from guard.policy.measuring import PLACED, Unplaced
from guard.proxy.wire import Fields, Seen, Slot, is_number

PART_TEXTS = ("text", "refusal", "thinking")
IDS = frozenset(("id", "call_id", "tool_call_id", "tool_use_id"))
"""Fields that join a call and its result; a client may write anything there, and templates show it."""

KINDS = frozenset(("type", "status"))
"""Fields that say what something is, in one word."""

ONE_WORD = re.compile(r"[a-z0-9_.]{0,64}")

NOT_SHOWN = frozenset(("cache_control",))
"""Fields that are for the engine alone."""

MEDIA = frozenset(
    (
        "image_url", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds", "video_url",
        "video_embeds", "file_data", "encrypted_content", "signature",
    )
)  # fmt: skip
"""Fields of parts whose text is no text."""

SOURCE, FILE = "source", "file"
"""Fields of parts that hold a picture, a document or a file, or say where it is."""

FILES = ("file_data", "file_id", "file_url")
UNREAD_FILE = "a document or a file is in the prompt, whose text the guard does not have"

CALLS = frozenset(("tool_calls", "function", "function_call"))
STRUCTURE = CALLS | {"content", "summary", "output"}
"""Fields of messages and their parts that hold parts, or calls of tools."""

SAID_ANYWAY = frozenset(
    (
        *("arguments", "custom", "description", "function", "id", "index", "input", "name", "parameters"),
        *("strict", "text", "title", "type"),
    )
)
"""Names of fields that are in every tool, call or document."""

TOOL_KINDS = ("function", "custom")

Place = Literal["part", "call", "raw"]
"""What a template is shown: of messages and their parts what the engine knows of them; of calls ids and whatever else
they have; of all else everything as it is, names too."""


def strings(message: int, value: Any, slots: Iterable[Slot] = (), *, place: Place = "part") -> Iterator[Slot]:
    """Every string and number inside, names of fields too, but for what says how a message is built, and for what
    ``slots`` have; of true and false those that templates print. ``place``: what ``value`` is."""
    if is_number(value):
        # A copy: it is read, and the engine takes no numbers where this is what a field of texts has.
        yield Slot(message, -1, [value], 0)
        return
    taken = {(id(slot.owner), slot.key) for slot in slots}
    waiting: list[tuple[Any, Place]] = [(value, place)]
    while waiting:
        one, at = waiting.pop()
        inside = enumerate(one) if isinstance(one, list) else one.items() if isinstance(one, dict) else ()
        for key, inner in inside:
            named = isinstance(key, str)
            if (id(one), key) in taken or (at == "part" and named and (key in NOT_SHOWN or key in MEDIA)):
                continue
            if isinstance(inner, str) and (
                (at != "raw" and key in IDS) or (at == "part" and (key == "role" or key in KINDS))
            ):
                if slot := _named(message, one, key):
                    yield slot
                continue
            if at == "part" and key in (SOURCE, FILE) and isinstance(inner, dict):
                waiting += [(readable, at) for readable in _readable(key, inner)]
                yield from _text_of(message, inner)
                continue
            if at != "part" and named and key not in SAID_ANYWAY:
                # A copy: a name is read, and stays.
                yield Slot(message, -1, [key], 0)
            if is_number(inner) or (isinstance(inner, bool) and at != "part" and key not in SAID_ANYWAY):
                yield Slot(message, -1, one, key)
            elif not isinstance(inner, str):
                waiting.append((inner, _place_of(key, at) if isinstance(key, str) else at))
            elif key != "type" or inner not in TOOL_KINDS:
                yield Slot(message, -1, one, key)


def beside_of(seen: Iterable[Seen]) -> list[Slot]:
    """What else of the messages templates may show than their texts."""
    return [slot for one in seen for slot in strings(one.number, one.shown, (*one.slots, *one.elsewhere))]


def _place_of(key: str, inside: Place) -> Place:
    if inside != "raw" and key in CALLS:
        return "call"
    return "part" if inside == "part" and key in STRUCTURE else "raw"


def _readable(key: str, held: Fields) -> list[Any]:
    """What of a part's source, or file, is built as messages are."""
    return [held["content"]] if key == SOURCE and held.get("type") == "content" and "content" in held else []


def _text_of(message: int, held: Fields) -> list[Slot]:
    """Texts of a part's source or file: of a plain document, or the name."""
    names = ["filename", *(("data",) if held.get("type") == "text" else ("content",))]
    return [Slot(message, -1, held, name) for name in names if isinstance(held.get(name), str)]


def unread_files(fields: Fields) -> str:
    """Why the texts of a request's messages are not all that a model may read of them."""
    waiting = [fields.get(name) for name in ("messages", "input", "system")]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        if not isinstance(one, dict):
            continue
        held, source = one.get(FILE), one.get(SOURCE)
        if any(place.get(name) is not None for place in (one, held) if isinstance(place, dict) for name in FILES):
            return UNREAD_FILE
        if isinstance(source, dict) and one.get("type") != "image":
            if source.get("type") not in ("text", "content"):
                return UNREAD_FILE
            waiting.append(source.get("content"))
        waiting += [one[name] for name in STRUCTURE if name in one]
    return ""


PICTURED = MEDIA - {"encrypted_content", "signature"} | {FILE, *FILES}
"""Fields that make a part a picture, a sound, a video or a file."""


def media_in(fields: Fields) -> int:
    """How many pictures, sounds, videos and files a request's messages have."""
    found = 0
    waiting = [fields.get(name) for name in ("messages", "input", "system")]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        if isinstance(one, dict):
            shown = any(one[name] is not None for name in PICTURED & one.keys())
            found += shown or isinstance(one.get(SOURCE), dict)
            waiting += [one[name] for name in STRUCTURE if name in one]
    return found


def _named(message: int, owner: Fields, key: str) -> Slot | None:
    """The text of a role, an id or a kind; None for one that says nothing."""
    text = owner[key]
    if key in IDS:
        # Short and of letters and digits, as the strictest templates want it.
        return Slot(message, -1, owner, key, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9])
    if key == "role":
        return role_slot(message, owner)
    return None if ONE_WORD.fullmatch(text) else Slot(message, -1, owner, key)


def role_slot(message: int, owner: Fields) -> Slot | None:
    """A role that a client thought of, which templates show; it counts as a user's."""
    role = owner.get("role")
    return Slot(message, -1, owner, "role", "user") if isinstance(role, str) and role not in KNOWN_ROLES else None


AS_TOKENS = "the prompt is given as tokens, whose text the guard does not have"

AROUND = (
    *("tools", "functions", "documents", "chat_template_kwargs", "suffix"),
    *("response_format", "text", "output_format", "output_config"),
)
"""Fields of a request that templates show outside of all messages."""


WHOSE = {"documents": DOCUMENTS, "chat_template_kwargs": OF_USERS, "suffix": 0}
"""Of these fields whose they are, as a message's index; a raw prompt is the first. The others are the application's
own, and of no message."""

UNPLACED_DOCUMENTS = Unplaced(
    documents="documents are in the prompt where only the chat template knows: send them as results of a tool"
)


def around(fields: Fields) -> list[Slot]:
    """Texts of these fields."""
    found = [slot for name in AROUND for slot in _texts_at(WHOSE.get(name, -1), fields, name)]
    arguments = fields.get("chat_template_kwargs")
    if not isinstance(arguments, dict):
        return found
    documents = _texts_at(DOCUMENTS, arguments, "documents")
    places = {(id(slot.owner), slot.key) for slot in documents}
    return [slot for slot in found if (id(slot.owner), slot.key) not in places] + documents


def _texts_at(message: int, owner: Fields, name: str) -> list[Slot]:
    value = owner.get(name)
    if value is None:
        return []
    if isinstance(value, str) or is_number(value):
        return [Slot(message, -1, owner, name)]
    return list(strings(message, value, place="raw"))


def documents_unplaced(fields: Fields) -> Unplaced:
    """Where documents are that a request has beside its messages, as a field or as an argument of the template."""
    arguments = fields.get("chat_template_kwargs")
    given = [fields.get("documents"), arguments.get("documents") if isinstance(arguments, dict) else None]
    return UNPLACED_DOCUMENTS if any(given) else PLACED


def text_slots(message: int, content: Any, owner: Fields, key: str) -> list[Slot]:
    """Texts of a content that is a text, or a list of parts of which some have one."""
    if isinstance(content, str):
        return [Slot(message, 0, owner, key)]
    parts = content if isinstance(content, list) else []
    return [
        slot
        for i, part in enumerate(parts)
        for slot in (
            [Slot(message, i, parts, i)]
            if isinstance(part, str)
            else [Slot(message, i, part, name) for name in PART_TEXTS if isinstance(part.get(name), str)]
            if isinstance(part, dict)
            else []
        )
    ]
