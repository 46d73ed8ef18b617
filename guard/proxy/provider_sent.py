"""What a provider is really asked: all that the client sent, or nothing is sent.

Owns the comparison of a request with the JSON that litellm makes of it. litellm leaves out, without a word, what it has
no form for; so each text, name, number and choice of the client's is looked for in what is about to be sent, wherever a
provider's form has it, and what is not there is named. What is not compared is listed here, and nothing else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

from guard.proxy.provider_request import DEFAULTS

UNCOMPARED = frozenset(
    (
        # Kinds and ids that each form spells in its own way, and hints that say nothing to a model.
        *("role", "type", "id", "index", "tool_call_id", "format", "media_type", "filename", "cache_control"),
        # Hints that OpenAI's libraries set by themselves: to keep to a schema, how closely to look at a picture.
        *("strict", "detail"),
        # What a client sends back of an earlier answer, and most APIs do not take.
        *("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", "annotations"),
        "provider_specific_fields",
    )
)
"""Of messages and tools."""

SAID_ANYWAY = frozenset(
    ("type", "title", "default", "examples", "nullable", "deprecated", "$schema", "$id", "$comment", "$ref")
)
"""Of a schema: each provider has a dialect of its own, in which these are put otherwise or say nothing."""

NOTED: Mapping[str, str] = {
    **{"minimum": "minimum value", "maximum": "maximum value", "multipleOf": "must be a multiple of"},
    **{"exclusiveMinimum": "exclusive minimum value", "exclusiveMaximum": "exclusive maximum value"},
    **{"minLength": "minimum length", "maxLength": "maximum length"},
    **{"minItems": "minimum number of items", "maxItems": "maximum number of items"},
    **{"minProperties": "minimum number of properties", "maxProperties": "maximum number of properties"},
}
"""Of a schema: bounds that are told in a description, in litellm's words, where a provider's dialect has none."""

NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Of a schema: fields with schemas by name."""

PROMPTS = frozenset(
    (
        *("messages", "message", "contents", "content", "prompt", "input", "inputs", "inputtext", "system", "texts"),
        *("query", "chathistory"),
    )
)
QUESTIONS = PROMPTS | {"requests", "instances"}
"""Fields of a request's JSON by which it is known for a question, and not for something that litellm wants to know."""

WITHOUT_SETTINGS = PROMPTS | {"tools", "functions", "systeminstruction"}

AS_IT_IS: Mapping[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in DEFAULTS.items()},
    **{"n": (1,), "best_of": (1,), "stop": ("", []), "logit_bias": ({},), "tools": ([],), "functions": ([],)},
    **{"tool_choice": ("auto",), "function_call": ("auto",), "response_format": ({"type": "text"},)},
    **{"modalities": (["text"],), "echo": (False,), "encoding_format": ("float",)},
    **{"reasoning_effort": ("none",), "suffix": ("",), "metadata": ({},)},
}
"""Values that ask for what comes anyway, where the field is left out."""

OURS = ("model", "stream", "stream_options", "user")
"""Fields that the proxy answers for itself, and one that no model sees: it tells a provider whose request it is."""

OF_TOOLS = ("tool", "function")
"""Roles of messages whose text some forms take as the JSON that it is."""

MAX_PASSES = 64
"""How often all that is sent may be searched for texts that stand in longer ones, in all. In turn they cost one pass
together; a text that is not there, or stands before the last one, costs another."""

NOTE = re.compile(rf"({'|'.join(NOTED.values())}): (-?\d+(?:\.\d+)?)")
SPELLINGS: tuple[Callable[[Any], str], ...] = (json.dumps, repr)

PAYLOAD = re.compile(r"data:[^,]{0,200},")


class Sent:
    """One request's JSON, as it is about to be sent."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._value = value
        self.texts: list[str] = []
        self.keys: set[str] = set()
        self.pairs: set[tuple[str, Any]] = set()
        self.numbers: set[tuple[int, ...]] = set()
        self._at = self._searched = 0
        self._spelling = 0
        for key, one in _leaves(value):
            self.keys.add(key)
            if isinstance(one, str):
                self.texts.append(one)
            if isinstance(one, str | int | float):
                self.pairs.add((plain(key), one))
            elif isinstance(one, list):
                self.numbers.add(tuple(one))
        self.names = {plain(key) for key in self.keys}

    @cached_property
    def whole(self) -> set[str]:
        return {*self.texts, *(text.strip() for text in self.texts)}

    @cached_property
    def objects(self) -> set[str]:
        """Texts that are JSON objects, each spelt in one way."""
        return {_spelt(value) for text in self.texts if text.startswith("{") and (value := json_in(text)) is not None}

    @cached_property
    def scalars(self) -> set[Any]:
        return {*(one for _, one in self.pairs), *chain.from_iterable(self.numbers)}

    @cached_property
    def settings(self) -> Counter[Any]:
        """Values beside the prompt and the tools; each stands for one setting."""
        held = _leaves(self._value, without=WITHOUT_SETTINGS)
        return Counter(one for _, one in held if isinstance(one, str | int | float))

    @cached_property
    def _notes(self) -> set[tuple[str, str]]:
        return {(words, value) for text in self.texts if "Note: " in text for words, value in NOTE.findall(text)}

    @cached_property
    def _joined(self) -> str:
        return "\0".join(self.texts)

    @property
    def is_question(self) -> bool:
        return any(plain(key) in QUESTIONS for key in self._value)

    def has(self, text: str) -> bool:
        """Whether it is said somewhere: alone, in a longer text, or as JSON in one. Messages keep their order."""
        bare = text.strip()
        if not bare or text in self.whole or bare in self.whole:
            return True
        if (payload := PAYLOAD.match(text)) and text[payload.end() :] in self.whole:
            return True
        return self._finds(bare) or self._finds(json.dumps(bare)[1:-1])

    def has_pair(self, key: str, value: Any) -> bool:
        """The same of a field with a value, which may be in a text."""
        pairs = {(plain(key), value), (plain(key), str(value))}
        if pairs & self.pairs or (NOTED.get(key), str(value)) in self._notes:
            return True
        return self._spells(lambda spell: f"{spell(key)}: {spell(value)}")

    def has_name(self, name: str) -> bool:
        """The same of a property."""
        return name in self.keys or self._spells(lambda spell: spell(name))

    def _spells(self, spelt: Callable[[Callable[[Any], str]], str]) -> bool:
        """Whether it is in a text, as JSON or as Python spells it; all of one text are spelt alike."""
        for _ in SPELLINGS:
            if self._finds(spelt(SPELLINGS[self._spelling])):
                return True
            self._spelling = (self._spelling + 1) % len(SPELLINGS)
        return False

    def has_key(self, *parts: str) -> bool:
        return any(part in name for name in self.names for part in parts)

    def takes(self, value: Any) -> bool:
        """Whether a setting has this value that no other one had."""
        if self.settings[value] < 1:
            return False
        self.settings[value] -= 1
        return True

    def below(self, *names: str) -> Sent:
        """What stands below fields of these names."""
        return Sent({str(i): one for i, one in enumerate(_named(self._value, names))})

    def _finds(self, text: str) -> bool:
        for begin in (self._at, 0):
            if self._searched > MAX_PASSES * len(self._joined):
                return False
            found = self._joined.find(text, begin)
            self._searched += (len(self._joined) if found < 0 else found) - begin
            if found >= 0:
                self._at = found + len(text)
                return True
        return False


def plain(key: str) -> str:
    """A field's name, however it is spelt."""
    return key.replace("_", "").lower()


def missing(fields: Mapping[str, Any], body: bytes) -> str | None:
    """The first field of a client's request that is not in what is about to be sent; None where all are. Raises
    ``ValueError`` for what is sent for another reason."""
    try:
        value: Any = json.loads(body)
    except RecursionError:
        raise ValueError from None
    if not isinstance(value, dict) or not (sent := Sent(value)).is_question:
        raise ValueError
    for name, one in fields.items():
        if name in OURS or one is None or one in AS_IT_IS.get(name, ()):
            continue
        try:
            lost = next(RULES.get(name, _other)(sent, name, one), None)
        except (RecursionError, TypeError):
            # No form that such a field has.
            lost = name
        if lost is not None:
            return lost
    return None


def _other(sent: Sent, name: str, value: Any) -> Iterator[str]:
    if not sent.has_key(plain(name)):
        yield name
    yield from _lost(sent, value, name)


def _number(sent: Sent, name: str, value: Any) -> Iterator[str]:
    if not sent.takes(value):
        yield name


def _words(sent: Sent, name: str, value: Any) -> Iterator[str]:
    if any(not sent.takes(one) for one in (value if isinstance(value, list) else [value])):
        yield name


def _by_key(*parts: str) -> Callable[[Sent, str, Any], Iterator[str]]:
    def rule(sent: Sent, name: str, value: Any) -> Iterator[str]:
        if not sent.has_key(*parts):
            yield name

    return rule


def _bias(sent: Sent, name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, dict) or not value.keys() <= sent.keys:
        yield name


def _chosen(sent: Sent, name: str, value: Any) -> Iterator[str]:
    below = sent.below("toolchoice", "toolconfig", "functioncall")
    if not below.keys:
        yield name
    yield from _lost(below, value if isinstance(value, dict) else None, name)


def _format(sent: Sent, name: str, value: Any) -> Iterator[str]:
    below = sent.below("responseformat", "generationconfig", "format", "outputformat", "outputconfig", "responseschema")
    if isinstance(value, dict) and isinstance(held := value.get("json_schema"), dict):
        # Some are given a tool whose arguments are to be the answer.
        if not below.keys and not sent.has("json_tool_call"):
            yield name
        if isinstance(told := held.get("description"), str) and not sent.has(told):
            yield f"{name}.json_schema.description"
        yield from _lost_schema(sent, held.get("schema"), f"{name}.json_schema.schema")
    elif not any("json" in text for text in below.texts):
        yield name


def _prompt(sent: Sent, name: str, value: Any) -> Iterator[str]:
    """A text, texts, tokens, or lists of tokens."""
    if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
        if tuple(value) not in sent.numbers:
            yield name
    elif isinstance(value, list):
        for one in value:
            yield from _prompt(sent, name, one)
    elif isinstance(value, str) and not sent.has(value):
        yield name


def _tools(sent: Sent, name: str, value: Any) -> Iterator[str]:
    for i, one in enumerate(value if isinstance(value, list) else ()):
        result = isinstance(one, dict) and one.get("role") in OF_TOOLS
        yield from _lost(sent, one, f"{name}[{i}]", result=result)


def _lost(sent: Sent, value: Any, where: str, *, result: bool = False) -> Iterator[str]:
    """What of messages and tools is not there. ``result``: it is a tool's."""
    if isinstance(value, list):
        for i, one in enumerate(value):
            yield from _lost(sent, one, f"{where}[{i}]", result=result)
    elif isinstance(value, dict):
        for key, one in value.items():
            place = f"{where}.{key}"
            if key in UNCOMPARED:
                continue
            if key == "parameters":
                yield from _lost_schema(sent, one, place)
            elif key == "arguments" or (result and key in ("content", "text") and isinstance(one, str)):
                yield from _lost_arguments(sent, one, place)
            elif isinstance(one, bool | int | float):
                if (plain(key), one) not in sent.pairs:
                    yield place
            else:
                yield from _lost(sent, one, place, result=result)
    elif isinstance(value, str) and not sent.has(value):
        yield where


def _lost_arguments(sent: Sent, value: Any, where: str) -> Iterator[str]:
    """JSON in a text, or JSON itself, which each form may have as the other."""
    told = json_in(value) if isinstance(value, str) else value
    if isinstance(value, str) and (value in sent.whole or told is None):
        if not sent.has(value):
            yield where
        return
    for key, one in _leaves(told):
        there = not key or key in sent.keys
        there &= not isinstance(one, str) or one in sent.whole or not one.strip()
        there &= not isinstance(one, bool | int | float) or (plain(key), one) in sent.pairs
        there &= not isinstance(one, list) or tuple(one) in sent.numbers
        if not there:
            spelt = [json.dumps(told), *([value] if isinstance(value, str) else [])]
            if _spelt(told) not in sent.objects and not any(sent.has(one) for one in spelt):
                yield where
            return


def _spelt(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def json_in(text: str | bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _lost_schema(sent: Sent, value: Any, where: str) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _lost_schema(sent, one, where)
    if not isinstance(value, dict):
        return
    for key, one in value.items():
        place = f"{where}.{key}"
        if key in SAID_ANYWAY or one is None:
            continue
        if key in NAMED and isinstance(one, dict):
            for name, inner in one.items():
                if key == "properties" and not sent.has_name(name):
                    yield f"{place}.{name}"
                yield from _lost_schema(sent, inner, f"{place}.{name}")
        elif key in ("required", "enum", "const"):
            values = one if isinstance(one, list) else [one]
            if not all(_is_one(sent, each) for each in values):
                yield place
        elif key == "description":
            if isinstance(one, str) and not sent.has(one):
                yield place
        elif isinstance(one, dict | list):
            yield from _lost_schema(sent, one, place)
        elif key != "additionalProperties" and not sent.has_pair(key, one):
            yield place


def _is_one(sent: Sent, value: Any) -> bool:
    """Whether a schema's value is there; some dialects have texts alone."""
    if isinstance(value, str | int | float) and value not in sent.scalars:
        return sent.has(value if isinstance(value, str) else str(value))
    return not isinstance(value, dict | list) or all(_is_one(sent, one) for _, one in _leaves(value))


def _leaves(value: Any, without: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Each value that holds no others with the field that it stands in, lists of numbers as one; and each field."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        key, one = waiting.pop()
        if without and plain(key) in without:
            continue
        if isinstance(one, dict):
            waiting += [(name, inner) for name, inner in reversed(one.items())]
            if key:
                yield key, None
        elif isinstance(one, list) and one and all(isinstance(each, int) for each in one):
            yield key, one
        elif isinstance(one, list):
            waiting += [(key, inner) for inner in reversed(one)]
            if key:
                yield key, None
        else:
            yield key, one


def _named(value: Any, names: tuple[str, ...]) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            for key, inner in one.items():
                if plain(key) in names:
                    yield inner
                else:
                    waiting.append(inner)


RULES: Mapping[str, Callable[[Sent, str, Any], Iterator[str]]] = {
    **{name: _number for name in ("max_tokens", "max_completion_tokens", "n", "best_of", "seed", "dimensions")},
    **{name: _number for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty", "top_logprobs")},
    **{name: _words for name in ("stop", "encoding_format", "safety_identifier", "prompt_cache_key", "service_tier")},
    **{name: _prompt for name in ("prompt", "input")},
    **{name: _tools for name in ("messages", "tools", "functions")},
    **{name: _chosen for name in ("tool_choice", "function_call")},
    "reasoning_effort": _by_key("think", "reason", "effort"),
    "logprobs": _by_key("logprob"),
    "parallel_tool_calls": _by_key("parallel"),
    "logit_bias": _bias,
    "response_format": _format,
}
"""How a field is looked for; any other one by its name and its texts."""
