"""What the guard has to know of an API's bodies: where texts stand in requests and answers, how an answer ends early.

Owns the types that each API fills in (``wire_choices``, ``wire_responses``, ``wire_messages``) and taking frames of a
stream apart. Never decides anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from guard.policy.measuring import Unplaced
from guard.proxy.errors import InvalidRequestError, UpstreamError
from guard.proxy.shown_items import ShownItems

Fields = dict[str, Any]


@dataclass(frozen=True)
class Slot:
    """One text of a request, where it stands: part ``part`` of message ``message``, counted as the model sees them; no
    part of its content where that is negative. ``instead``: what alone can stand there in its place; None: any text.
    A number is a text as well, as JSON spells it."""

    message: int
    part: int
    owner: Any
    key: Any
    instead: str | None = None

    @property
    def text(self) -> str:
        return _text(self.owner[self.key])

    def replace(self, text: str) -> None:
        """Put another text there. A number becomes the least of its kind, as the engine may take nothing else there."""
        old = self.owner[self.key]
        least = type(old)() if is_number(old) or isinstance(old, bool) else None
        self.owner[self.key] = _like(old, text if self.instead is None else self.instead) if least is None else least


@dataclass(frozen=True)
class Piece:
    """One text of an answer, where it stands: the next part of ``channel``, or all of it where ``whole``.

    ``tokens``: how many, at least; of a frame's pieces one has them. ``traces``: other places that show these tokens.
    ``spelt``: the text, where what stands there is no text but shows one; it can be taken out and not replaced.
    """

    choice: int
    channel: str
    owner: Any
    key: Any
    tokens: int = 0
    whole: bool = False
    traces: tuple[tuple[Any, str], ...] = ()
    spelt: str | None = None

    @property
    def text(self) -> str:
        return _text(self.owner[self.key]) if self.spelt is None else self.spelt

    def replace(self, text: str) -> None:
        """Put another text there, and take out what else shows the old one."""
        self.owner[self.key] = _like(self.owner[self.key], text) if self.spelt is None else None
        for owner, key in self.traces:
            if key in owner:
                owner[key] = None


@dataclass(frozen=True)
class Seen:
    """What something of a request is in a message that the model sees. ``slots``: its texts; ``shown``: all that is of
    this message; ``elsewhere``: places in there that are of another one. ``number``: the message's; below 0 where vLLM
    makes none of it."""

    role: str
    number: int
    slots: list[Slot]
    shown: Any = None
    elsewhere: Sequence[Slot] = ()


def roles_of(seen: Iterable[Seen]) -> tuple[str, ...]:
    """Of the messages, in order."""
    return tuple({one.number: one.role for one in seen if one.number >= 0}.values())


UNFINISHED = ("prefix", "partial")
"""Fields by which some servers take a message for the beginning of the answer."""


def check_messages(fields: Fields) -> None:
    """Raises ``InvalidRequestError`` unless there are messages, each with a role."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages must be a list that is not empty", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequestError(f"messages[{i}] must be an object", f"messages[{i}]")
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{i}].role must be a string", f"messages[{i}].role")
        for name in UNFINISHED:
            if message.get(name) not in (None, False):
                where = f"messages[{i}].{name}"
                raise InvalidRequestError(f"{where}: an answer to go on with cannot be guarded", where)


MAX_DIGITS = 4300
"""Of a number in a text; Python, and so the engine, reads no longer one."""


def whole_number(value: Any) -> int | None:
    """As the engine reads a field: it takes ``"2"`` and ``2.0`` for a number, too. None for what is none."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) <= MAX_DIGITS else None
    whole = not isinstance(value, bool) and isinstance(value, int | float) and value == int(value)
    return int(value) if whole else None


def _text(value: Any) -> str:
    """A tool's arguments may be JSON that is no text yet."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _like(old: Any, text: str) -> Any:
    return text if isinstance(old, str | int | float) else {"redacted": text}


NUMBERS = (int, float)
"""As ``isinstance`` takes them: every value of a request is asked, and a union is made anew each time."""


def is_number(value: Any) -> bool:
    """Also a list of nothing but numbers: templates print it as one text."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, NUMBERS) for one in value)
    return isinstance(value, NUMBERS) and not isinstance(value, bool)


TOKENS = "logprobs."
"""Begins the names of channels that are tokens' own texts."""


def token_pieces(choice: int, owner: Fields, key: str, *, at: str = "", whole: bool = False) -> list[Piece]:
    """The texts that the logprobs at ``key`` show: the tokens', which may be more than the answer's text, as what comes
    before a stop word is held back and the word itself left out; and those of the tokens that were not said, by rank.
    """
    if owner.get(key) is None:
        return []
    return [
        Piece(choice, f"{TOKENS}{rank}{at}", owner, key, whole=whole, spelt=text)
        for rank, text in enumerate(_by_rank(owner.get(key)))
        if text
    ]


def prompt_pieces(choice: int, owner: Fields, key: str = "prompt_logprobs") -> list[Piece]:
    """The same of what a model makes of its prompt: at each token the likely ones, by rank."""
    if owner.get(key) is None:
        return []
    likely = [[str(one.get("decoded_token") or "") for one in at.values()] for at in owner.get(key) or () if at]
    ranks = max(map(len, likely), default=0)
    spelt = ["".join(at[rank] for at in likely if rank < len(at)) for rank in range(ranks)]
    return [Piece(choice, f"{TOKENS}prompt.{rank}", owner, key, spelt=text) for rank, text in enumerate(spelt) if text]


def _by_rank(logprobs: Any) -> list[str]:
    lists = [logprobs]
    if isinstance(logprobs, dict):
        lists = [logprobs.get(name) for name in ("content", "refusal", "tokens")]
    entries = [entry for one in lists if isinstance(one, list) for entry in one]
    others = [_others(entry) for entry in entries]
    if isinstance(logprobs, dict) and isinstance(logprobs.get("tokens"), list):
        others = [list(one) if isinstance(one, dict) else [] for one in logprobs.get("top_logprobs") or ()]
    ranks = max((len(one) for one in others), default=0)
    ranked = ["".join(one[rank] for one in others if rank < len(one)) for rank in range(ranks)]
    return [_spelt(entries), *ranked]


def _others(entry: Any) -> list[str]:
    found = entry.get("top_logprobs") if isinstance(entry, dict) else None
    return [str(one.get("token", "")) for one in found or ()]


def _spelt(entries: list[Any]) -> str:
    """A character may be several tokens, of which only the bytes say anything."""
    parts = []
    for entry in entries:
        token = str(entry.get("token", "")) if isinstance(entry, dict) else str(entry)
        known = entry.get("bytes") if isinstance(entry, dict) and "\ufffd" in token else None
        parts.append(bytes(known) if known else token.encode("utf-8", "surrogatepass"))
    return b"".join(parts).decode("utf-8", "replace")


@dataclass(frozen=True)
class Ending:
    """An answer that the guard ends. ``prompt_tokens``: None where nobody told them; the answer then has no usage, as
    clients know it of answers that broke off. ``first`` and ``last``: what of a stream the client got, None where
    nothing; ``items``: what it has of a response's."""

    request_id: str
    model: str
    choices: int
    wants_usage: bool
    prompt_tokens: int | None
    completion_tokens: int = 0
    first: Mapping[str, Any] | None = None
    last: Mapping[str, Any] | None = None
    items: ShownItems | None = None


@dataclass(frozen=True)
class Texts:
    """Requests of one API. ``check`` raises ``InvalidRequestError``, and so does ``check_served``, for what the API has
    and vLLM would read in another way than these functions say, or not at all; ``roles``: of the messages as the model
    sees them. ``beside``: what a template may show as well; its message's index is negative where it is in none.
    ``unread``: why the texts are not all that the model reads; empty when they are. ``unplaced``: what is not known of
    where in the prompt it stands."""

    route: str
    check: Callable[[Fields], None]
    roles: Callable[[Fields], tuple[str, ...]]
    slots: Callable[[Fields], list[Slot]]
    beside: Callable[[Fields], list[Slot]]
    unread: Callable[[Fields], str]
    unplaced: Callable[[Fields], Unplaced]
    check_served: Callable[[Fields], None] = field(default=lambda fields: None, kw_only=True)


@dataclass(frozen=True)
class Form(Texts):
    """One API that answers with text. ``choices``: how many answers a request asks for. ``limits``: the fields that say
    the most tokens of one; the first that is there counts, as for vLLM.

    ``words``: whether a channel is what the answer says, and neither reasoning nor a tool's call.
    ``pieces``: of a whole answer or of one event of a stream. ``parts``: an event as one for each choice, with its
    choice. ``ends``: whether a frame is an answer's last. ``refusal`` and ``refusal_stream``: an answer that is the
    guard's text. ``cut``: what ends a stream that has begun. ``named_errors``: errors have a type, and an event's name.
    ``has_items``: an answer's last event has all that was said, as items.
    """

    choices: Callable[[Fields], int]
    limits: tuple[str, ...]
    words: Callable[[str], bool]
    pieces: Callable[[Any], list[Piece]]
    parts: Callable[[Fields], list[tuple[int | None, Fields]]]
    ends: Callable[[bytes], bool]
    refusal: Callable[[Ending, str], Fields]
    refusal_stream: Callable[[Ending, str], bytes]
    cut: Callable[[Ending], bytes]
    named_errors: bool = False
    has_items: bool = False


def as_one(data: Fields) -> list[tuple[int | None, Fields]]:
    """``parts`` of an API that gives one answer."""
    return [(0, data)]


@dataclass
class Frame:
    """One server-sent event. ``data``: its JSON, None where it has none. ``place``: how many tokens of its choice there
    are up to its end. ``units``: the text that each piece is of, as it is judged; ``starts``: where in that it begins.
    ``came_s``: when, by ``perf_counter``."""

    raw: bytes
    data: Fields | None
    choice: int | None = None
    pieces: list[Piece] = field(default_factory=list)
    units: list[tuple[int, str]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    place: int = 0
    changed: bool = False
    came_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    def to_bytes(self) -> bytes:
        return with_data(self.raw, self.data) if self.changed else self.raw


DATA = b"data:"
BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"


def frames_of(form: Form, raw: bytes) -> list[Frame]:
    """A frame, taken apart where it speaks of several choices, without what clients have no use for and no rule reads;
    none where it has no data. Raises ``UpstreamError`` for what is no JSON."""
    if b"\r" in raw:
        # Clients take it for the end of a line, and may read another event than the one that is judged.
        raise UpstreamError(UNREADABLE)
    if raw.startswith(BOM):
        # Clients leave it out, and read what is after it.
        raise UpstreamError(UNREADABLE)
    text = b"\n".join(line[len(DATA) :].strip() for line in raw.split(b"\n") if line.startswith(DATA))
    if not text:
        # Clients make no event of it.
        return []
    if text == DONE:
        return [Frame(_only(raw, None), None)]
    try:
        data = answer_json(text)
        if not isinstance(data, dict):
            raise UpstreamError(UNREADABLE)
        raw = _only(raw, data.get("type"))
        parts = form.parts(data)
        return [
            Frame(raw if len(parts) == 1 else with_data(raw, one), one, choice, form.pieces(one))
            for choice, one in parts
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # What cannot be read cannot be judged.
        raise UpstreamError(UNREADABLE) from None


UNREADABLE = "the model server's answer cannot be read"


def _only(raw: bytes, kind: Any) -> bytes:
    """A frame without lines that nobody reads here: its data, and the event's name where the data say the same."""
    if raw.startswith(DATA) and raw.count(b"\n") <= 2:
        return raw
    named = str(kind).encode("utf-8", "surrogatepass")
    lines = raw.rstrip(b"\n").split(b"\n")
    kept = (line for line in lines if line.startswith(DATA) or _name_in(line) == named)
    return b"\n".join(kept) + b"\n\n"


def _name_in(line: bytes) -> bytes | None:
    return line.removeprefix(b"event:").strip() if line.startswith(b"event:") else None


def answer_json(text: bytes) -> Any:
    """Raises ``ValueError``, for the same key twice too: clients may read the other one."""
    return json.loads(text, object_pairs_hook=_once_each)


def _once_each(pairs: list[tuple[str, Any]]) -> Fields:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("the same key twice")
    return fields


def with_data(raw: bytes, data: Fields | None) -> bytes:
    """A frame with other JSON; its other lines stay."""
    lines = [line for line in raw.rstrip(b"\n").split(b"\n") if not line.startswith(DATA)]
    return b"\n".join([*lines, b"data: " + compact(data)]) + b"\n\n"


def compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def event(data: Fields, name: str | None = None) -> bytes:
    """One frame."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + compact(data) + b"\n\n"
