"""A request's body: read within limits, parsed so that guard and vLLM see the same, and written again.

Owns what is refused at the edge. Every field that is not ours passes as it is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isfinite
from typing import Any, Generic, NoReturn, TypeVar

from guard.mia.spec import FOREIGN_KEYS
from guard.policy.conversation import places, roles_named
from guard.policy.measuring import Part, Unplaced
from guard.policy.schema import Redaction
from guard.proxy.client_threads import TextThreads
from guard.proxy.errors import InvalidRequestError
from guard.proxy.shown_texts import IDS
from guard.proxy.turn_marks import marks_turns, may_mark_turns
from guard.proxy.wire import Slot, Texts, is_number, whole_number

F = TypeVar("F", bound=Texts)
F_co = TypeVar("F_co", bound=Texts, covariant=True)

XARGS, OURS = "vllm_xargs", "mia"
"""vLLM's field for others, and the key in it under which the guard asks."""

OF_TEXTS = ("roles", "texts", "characters", "unread", "unplaced")
"""What is worked out once of a request's texts."""

MAX_MESSAGES = 10_000
"""Most messages, or items, of one request."""

MAX_PARTS = 20_000
"""Most parts of all its messages together."""

MAX_TOOLS = 2_000
"""Most tools, or functions, of one request."""

NUMBERS_OF_CHOICES = ("n", "best_of")
MAX_CHOICES = 128
"""Most choices of one answer, as OpenAI has it: each is judged, charged and, when a rule ends it, ended by itself."""

MAX_VALUES = 100_000
"""Most texts, fields, lists and objects in a body, at any depth: each may be a text of its own to judge, however short.
A list of nothing but numbers is one: a prompt in tokens has many."""

MAX_DEPTH = 200
"""Most lists and objects inside one another. Copying, and writing as JSON, takes Python's stack, which ends at some
hundreds."""

QUICK_BYTES = 64 * 1024
"""Bodies up to this length are parsed at once; longer ones in a thread, so that nobody else waits."""

UNMEASURABLE: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "truncate_prompt_tokens": (None,),
    "chat_template": (None,),
    "return_assistant_tokens_mask": (None, False),
}
"""Fields that decide what of a prompt the detectors get to see, and the values that change nothing."""

TOKENIZING: dict[str, tuple[Any, ...]] = {
    "tokenize": (None, False),
    "padding": (None, False),
    "truncation": (None, False),
    "max_length": (None,),
    "return_tensors": (None,),
    "return_dict": (None, False),
    "sanitize_control_tokens": (None, False),
    "tokenizer_kwargs": (None,),
    "processor_kwargs": (None,),
    "text_kwargs": (None,),
    "common_kwargs": (None,),
    "load_audio_from_video": (None, False),
    "add_special_tokens": (None, False),
}
"""Arguments of ``apply_chat_template``, and of a model's processor, that pad or cut a prompt, or make it other tokens:
the model then reads something after, or before, the place where its answer begins."""

REPLACING: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        *("self", "conversation", "messages", "model_config", "tokenizer", "template_id"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("additional_special_tokens", "extra_special_tokens"),
    ),
    (None,),
)
"""Variables that a template has from the engine: what else stands in their place is another prompt."""

MARKED = "a text has marks in it that chat templates end turns with: who says what is not known"

UNGUARDED: dict[str, tuple[Any, ...]] = {
    "truncation": (None, "disabled"),
    "enable_response_messages": (None, False),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
}
"""Fields by which a prompt would be cut, an answer would have its raw text and tokens beside what rules read, or a
prompt would be what another request left in a cache; and the values that change nothing."""

OF_ALL = UNMEASURABLE | UNGUARDED
OF_MESSAGES = OF_ALL | {"add_special_tokens": TOKENIZING["add_special_tokens"]}
"""Of a text, special tokens are the tokenizer's default."""

INSIDE = {
    "chat_template_kwargs": UNMEASURABLE | TOKENIZING | REPLACING,
    "mm_processor_kwargs": TOKENIZING,
}
"""The same of what stands in these fields."""

EACH_USAGE = "continuous_usage_stats"
"""vLLM's option of a stream to tell the usage with every part."""


@dataclass(frozen=True)
class GuardedRequest(Generic[F_co]):
    """A request that vLLM gets as it is but for our own field, and what a policy changes of it."""

    form: F_co
    fields: dict[str, Any]
    counted: bool = False
    """Whether vLLM is asked to tell the usage with every part of a stream, which is then for us alone."""

    @property
    def model(self) -> str:
        return str(self.fields["model"])

    @property
    def streamed(self) -> bool:
        return self.fields.get("stream") is True

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Of the messages, in order, as the model sees them."""
        return self.form.roles(self.fields)

    @cached_property
    def texts(self) -> list[Part]:
        """Every text of the messages, and what else the model may be shown."""
        return [(slot.message, slot.part, slot.text) for slot in self._shown]

    @cached_property
    def characters(self) -> int:
        """Of all texts together."""
        return sum(len(text) for _, _, text in self.texts)

    @property
    def said(self) -> list[Part]:
        """The same without ids and roles, for a model that is asked about the conversation."""
        return [(slot.message, slot.part, slot.text) for slot in self._shown if slot.instead is None]

    @property
    def _shown(self) -> list[Slot]:
        """Not kept: of a long conversation there are many."""
        return [*self.form.slots(self.fields), *self.form.beside(self.fields)]

    @cached_property
    def unread(self) -> str:
        """Why these are not all texts that the model reads; empty when they are."""
        return self.form.unread(self.fields)

    @cached_property
    def unplaced(self) -> Unplaced:
        """What is not known of where in the prompt it stands."""
        known = self.form.unplaced(self.fields)
        return replace(known, turns=MARKED) if may_mark_turns(self.fields) and marks_turns(self.texts) else known

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with a count of tokens."""
        options = self.fields.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def counting(self) -> GuardedRequest[F_co]:
        """The same, ``counted`` where its client wants a usage at the end alone: an answer that is cut has no end."""
        options = self.fields.get("stream_options")
        if not (self.streamed and self.wants_usage and isinstance(options, dict)) or options.get(EACH_USAGE):
            return self
        return self._saying_the_same({}, counted=True)

    def routed(self, model: str) -> GuardedRequest[F_co]:
        """The same for another model."""
        return self._saying_the_same({"model": model}, counted=self.counted)

    def _saying_the_same(self, changed: dict[str, Any], *, counted: bool) -> GuardedRequest[F_co]:
        """The same with other fields that no text is in: what is known of its texts stays known."""
        same = replace(self, fields={**self.fields, **changed}, counted=counted)
        same.__dict__.update({name: self.__dict__[name] for name in OF_TEXTS if name in self.__dict__})
        return same

    def redacted(self, redactions: Sequence[Redaction]) -> GuardedRequest[F_co]:
        """The same with the texts of all messages that are meant replaced, and what else templates may show of them."""
        same = replace(self, fields=copy.deepcopy(self.fields))
        same.redact(redactions)
        return same

    def redact(self, redactions: Sequence[Redaction]) -> None:
        """Take them out of this request's own fields, of which nothing may have been worked out before."""
        for one in redactions:
            self._redact(one.messages, one.replacement)

    def _redact(self, selectors: Sequence[str], replacement: str) -> None:
        fields, roles = self.fields, self.form.roles(self.fields)
        slots, meant, named = self.form.slots(fields), places(selectors, roles), roles_named(selectors)
        parts: dict[int, int] = {}
        for slot in slots:
            parts[slot.message] = max(parts.get(slot.message, 0), slot.part + 1)
        everything = [*slots, *self.form.beside(fields)]
        ids: set[str] = set()
        for slot in everything:
            places_of = (None,) if slot.part < 0 else (None, slot.part, slot.part - parts[slot.message])
            if meant & {(slot.message, part) for part in places_of} and not (slot.key == "role" and slot.text in named):
                if slot.key in IDS:
                    ids.add(slot.text)
                else:
                    slot.replace(replacement)
        # An id stands in the call and in its result; what joined them still does.
        for slot in everything:
            if slot.key in IDS and slot.text in ids:
                slot.replace(replacement)

    def worked_out(self) -> GuardedRequest[F_co]:
        """The same, once everything is known of it that takes longer the more there is."""
        _ = self.unplaced, self.characters, self.unread, self.roles
        return self

    def to_json(self, spec: str | None = None) -> bytes:
        """The body for vLLM, asking for ``spec``, in its wire form, if there is one."""
        given = self.fields.get(XARGS)
        if spec is not None:
            given = {**(given or {}), OURS: spec}
        if given is None and XARGS not in self.fields:
            return self._written
        return self._written[:-1] + b',"vllm_xargs":' + _json(given) + b"}"

    async def written(self, threads: TextThreads) -> None:
        """Write a long body in a thread, before it is asked for. Raises as ``to_json``."""
        if self.characters > QUICK_BYTES:
            await threads.parse(lambda: self._written)

    @cached_property
    def _written(self) -> bytes:
        """All but the field that ours is in."""
        fields = {name: value for name, value in self.fields.items() if name != XARGS}
        if self.counted:
            fields["stream_options"] = {**fields["stream_options"], EACH_USAGE: True}
        return _json(fields)


def _json(value: Any) -> bytes:
    """Raises ``InvalidRequestError``."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


async def parsed(form: F, raw: bytes, threads: TextThreads) -> GuardedRequest[F]:
    """As ``parse_request``; long bodies in a thread."""
    if len(raw) <= QUICK_BYTES:
        return parse_request(form, raw)
    return await threads.parse(partial(parse_request, form, raw))


def parse_request(form: F, raw: bytes) -> GuardedRequest[F]:
    """Raises ``InvalidRequestError`` that names the field; never another exception."""
    fields = _parse_object(raw)
    request = checked(form, fields)
    form.check_served(fields)
    # Worked out here, where nobody else waits while a long text is searched.
    return request.worked_out()


def checked(form: F, fields: dict[str, Any]) -> GuardedRequest[F]:
    """A request with these fields, whoever serves it. Raises ``InvalidRequestError`` that names the field."""
    check_size(fields)
    if not isinstance(fields.get("model"), str) or not fields["model"]:
        raise InvalidRequestError("model must be a string that is not empty", "model")
    form.check(fields)
    if not isinstance(fields.get("stream"), bool | None):
        raise InvalidRequestError("stream must be true or false", "stream")
    xargs = fields.get("vllm_xargs")
    if not isinstance(xargs, dict | None):
        raise InvalidRequestError("vllm_xargs must be an object", "vllm_xargs")
    if xargs and (taken := sorted(xargs.keys() & {OURS, *FOREIGN_KEYS})):
        raise InvalidRequestError(
            f"vllm_xargs.{taken[0]} is set by the guard alone; remove it", f"vllm_xargs.{taken[0]}"
        )
    _check_guardable(fields)
    return GuardedRequest(form, fields)


def _check_guardable(fields: dict[str, Any]) -> None:
    """Detectors are calibrated on whole prompts that end where the model begins its answer. What would have them
    measure elsewhere, or not at all, is not a client's to choose; nor is what no rule would read."""
    _check_values("", fields, OF_MESSAGES if "messages" in fields else OF_ALL)
    for name, values in INSIDE.items():
        if isinstance(given := fields.get(name), dict):
            _check_values(f"{name}.", given, values)


def _check_values(prefix: str, found: dict[str, Any], harmless: dict[str, tuple[Any, ...]]) -> None:
    for name, value in found.items():
        if name in harmless and value not in harmless[name]:
            raise InvalidRequestError(f"{prefix}{name} cannot be guarded with this value", prefix + name)


COUNTED = (str, list, dict)
"""What counts as a value of a request, as ``isinstance`` takes it: a union would be made anew for each."""


def check_size(fields: dict[str, Any]) -> None:
    """Raises ``InvalidRequestError`` for more than a request may have: each takes time, in the guard and in vLLM."""
    for name in NUMBERS_OF_CHOICES:
        _check_choices(name, fields.get(name))
    for name, most in (("tools", MAX_TOOLS), ("functions", MAX_TOOLS), ("messages", MAX_MESSAGES)):
        _check_length(name, fields.get(name), most)
    messages, given = _messages_in(fields.get("messages")), _messages_in(fields.get("input"))
    _check_length("messages", messages, MAX_MESSAGES)
    _check_length("input", given, MAX_MESSAGES)
    contents = [one.get("content") for one in (*messages, *given)]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MAX_PARTS:
        raise InvalidRequestError(
            f"the messages have {parts} parts together; at most {MAX_PARTS} are taken", "messages"
        )
    left, depth = MAX_VALUES, 0
    level: list[Any] = [fields]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"the body is nested too deeply: more than {MAX_DEPTH} lists and objects")
        below: list[Any] = []
        for one in level:
            inside = one.values() if isinstance(one, dict) else one
            found = [inner for inner in inside if isinstance(inner, COUNTED)]
            left -= 0 if is_number(one) else len(one)
            if left < 0:
                raise InvalidRequestError(f"the body has more than {MAX_VALUES} texts, fields, lists and objects")
            below += [inner for inner in found if not isinstance(inner, str)]
        level = below


def _check_choices(name: str, value: Any) -> None:
    """What the engine would read as another number than the guard must not reach it."""
    choices = 1 if value is None else whole_number(value)
    if choices is None or choices > MAX_CHOICES:
        raise InvalidRequestError(f"{name} must be a whole number, and at most {MAX_CHOICES}", name)


def _messages_in(value: Any) -> list[dict[str, Any]]:
    """Of a list of messages, or of several such lists."""
    lists = [value, *value] if isinstance(value, list) else []
    return [one for inner in lists if isinstance(inner, list) for one in inner if isinstance(one, dict)]


def _check_length(name: str, value: Any, most: int) -> None:
    if isinstance(value, list) and len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} entries; at most {most} are taken", name)


def _parse_object(raw: bytes) -> dict[str, Any]:
    """JSON in which nothing can be read in two ways: no key twice, no NaN, no number beyond float64, strict UTF-8."""
    try:
        value = _DECODER.decode(raw.decode("utf-8"))
    except InvalidRequestError:
        raise
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError:
        raise InvalidRequestError("the body has an integer with too many digits") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise InvalidRequestError("the body has an object with the same key twice")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the body has {name}, which is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise InvalidRequestError("the body has a number that is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_once_each, parse_constant=_refuse_constant, parse_float=_finite)
