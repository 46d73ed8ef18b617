"""What a request to another provider's model may have, and what litellm is handed of it.

Owns the fields that are sent, and what is refused because litellm would drop it, fetch it, or make far more of it than
it is. Knows nothing of litellm's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from guard.proxy.errors import InvalidRequestError
from guard.proxy.provider_media import AS_THEY_ARE, check_media
from guard.proxy.shown_texts import TOOL_KINDS
from guard.proxy.wire import whole_number

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

SAMPLING = (
    *("frequency_penalty", "logit_bias", "max_tokens", "n", "presence_penalty", "seed", "stop", "stream"),
    *("stream_options", "temperature", "top_p", "user"),
)
SENT: Mapping[str, tuple[str, ...]] = {
    CHAT: (
        *("messages", *SAMPLING, "audio", "function_call", "functions", "logprobs", "max_completion_tokens"),
        *("modalities", "parallel_tool_calls", "prediction", "prompt_cache_key", "reasoning_effort"),
        *("response_format", "safety_identifier", "service_tier", "store", "tool_choice", "tools", "top_logprobs"),
        "verbosity",
    ),
    COMPLETIONS: ("prompt", *SAMPLING, "best_of", "echo", "logprobs", "suffix"),
    EMBEDDINGS: ("input", "dimensions", "encoding_format", "user"),
}
"""The APIs that these models answer, and the fields of OpenAI's own. Nothing else goes to litellm: there a field may be
an address, to which it would send the provider's key."""

DEFAULTS: Mapping[str, Any] = {
    **{"frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "parallel_tool_calls": True},
    **{"service_tier": "auto", "store": False},
}
"""What these are where nobody gives them: litellm refuses the field itself for providers that have none such."""

AS_CHATS = frozenset(
    ("openai", "azure", "azure_ai", "deepseek", "gemini", "groq", "huggingface", "openrouter", "xai", "litellm_proxy")
)
"""Providers, by litellm's names, who are asked for chats whatever the API."""

NUMBERED: Mapping[str, frozenset[str]] = {
    CHAT: AS_CHATS | {"hosted_vllm", "together_ai", "fireworks_ai"},
    COMPLETIONS: AS_CHATS,
}
"""Providers of whose streams litellm keeps which choice a text belongs to, as measured with litellm 1.108.7 by
``tests/proxy/test_provider_answers.py``. Of others it puts all choices into one."""

SPELT_OUT = frozenset(("hosted_vllm", "text-completion-openai", "together_ai", "fireworks_ai"))
"""Providers of whose whole answers to ``/v1/completions`` litellm keeps the log probabilities. Of others, and of all
streams, it loses them, or asks for them as no provider takes it."""

LOGPROBS = "logprobs"
METADATA = "metadata"
"""A field of OpenAI's own too, of chats; litellm takes one of this name for its own and passes it to nobody."""

KEEP_METADATA = ("openai", "azure")
"""Providers, by litellm's names, whose API has that field."""

LIMITS_OF_METADATA = (16, 64, 512)
"""OpenAI's: pairs, and characters of a key and of a value."""

SEARCH = "web_search_options"
FETCHED = "the provider would put into the prompt what nobody reads here"

CUSTOM = "custom"
GET_CUSTOM = AS_THEY_ARE | {"azure_ai", "mistral", "ollama_chat", "ollama"}
"""Providers, by litellm's names, for whom it has a form of tools that take a text."""

MAX_WRITTEN_OUT = 100_000
"""Values that all references in a request's schemas stand for together; 32 characters of a text count as one more. For
some providers litellm writes them out, and a schema of some kilobytes may stand for more than any memory holds."""

CHARACTERS_PER_VALUE = 32

REF = "$ref"
SCHEMA_FIELDS = ("tools", "functions", "response_format")


def check_request(path: str, fields: Mapping[str, Any], provider: str) -> None:
    """``provider``: litellm's name. Raises ``InvalidRequestError`` for another API; for a field that the provider would
    not get, since a silence there is no answer; for what it would fetch by itself; and for schemas without bound."""
    if path not in SENT:
        raise InvalidRequestError(f"another provider serves this model: ask it by {', '.join(SENT)}", "model")
    _check_tools(provider, fields)
    check_media(provider, fields)
    beside = {METADATA} if path == CHAT and provider in KEEP_METADATA else set()
    if unknown := sorted(fields.keys() - {*SENT[path], *beside, "model"}):
        name = unknown[0]
        raise InvalidRequestError(f"{name} is not passed to the other provider that serves this model", name)
    if fields.get(METADATA) is not None:
        _check_metadata(fields[METADATA])
    _check_answer(path, fields, provider)
    _check_schemas(fields, recursive=provider in AS_THEY_ARE)


def _check_answer(path: str, fields: Mapping[str, Any], provider: str) -> None:
    """Raises ``InvalidRequestError`` for what litellm loses of answers."""
    streamed = fields.get("stream") is True
    if streamed and (whole_number(fields.get("n")) or 1) > 1 and provider not in NUMBERED.get(path, ()):
        raise InvalidRequestError("n: in streams of this API and provider, choices would be mixed into one", "n")
    if path == COMPLETIONS and fields.get(LOGPROBS) is not None and (streamed or provider not in SPELT_OUT):
        raise InvalidRequestError("logprobs are lost in such answers of this API and provider", LOGPROBS)


def arguments(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """For litellm, of a request that was checked."""
    given = {name: value for name, value in fields.items() if name in SENT[path] and value is not None}
    found = {name: value for name, value in given.items() if not _comes_anyway(name, value)}
    if fields.get(METADATA) is not None:
        found["extra_body"] = {METADATA: fields[METADATA]}
    return found


def _comes_anyway(name: str, value: Any) -> bool:
    default = DEFAULTS.get(name)
    return default is not None and isinstance(value, bool) == isinstance(default, bool) and value == default


def _check_tools(provider: str, fields: Mapping[str, Any]) -> None:
    if fields.get(SEARCH) is not None:
        raise InvalidRequestError(f"{SEARCH}: {FETCHED}", SEARCH)
    tools = fields.get("tools")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict) or tool.get("type") not in TOOL_KINDS:
            where = f"tools[{i}]"
            raise InvalidRequestError(f"{where} must be of type {' or '.join(TOOL_KINDS)}: {FETCHED}", where)
        if tool["type"] == CUSTOM and provider not in GET_CUSTOM:
            where = f"tools[{i}]"
            raise InvalidRequestError(f"{where}: tools of type {CUSTOM} do not reach models of {provider}", where)


def _check_metadata(given: Any) -> None:
    pairs = given.items() if isinstance(given, dict) else None
    if pairs is None or not all(isinstance(value, str) for _, value in pairs):
        raise InvalidRequestError("metadata must be an object of texts", METADATA)
    longest = (max(map(len, part), default=0) for part in (given, given.values()))
    if any(size > most for size, most in zip((len(given), *longest), LIMITS_OF_METADATA, strict=True)):
        raise InvalidRequestError(
            "metadata may have {} pairs, keys of {} and values of {} characters".format(*LIMITS_OF_METADATA), METADATA
        )


def _check_schemas(fields: Mapping[str, Any], *, recursive: bool) -> None:
    left = MAX_WRITTEN_OUT
    for name in SCHEMA_FIELDS:
        for schema in _schemas(fields.get(name)):
            try:
                size = _References(schema).size(schema)
            except RecursionError:
                raise InvalidRequestError(f"{name} has references behind references too deeply", name) from None
            if size is None and not recursive:
                raise InvalidRequestError(
                    f"{name} has a schema that refers to itself, which has no form for the provider of this model", name
                )
            left -= size or 0
            if left < 0:
                raise InvalidRequestError(
                    f"{name}: what each {REF} of a request's schemas stands for may have {MAX_WRITTEN_OUT} values "
                    "in all",
                    name,
                )


def _schemas(value: Any) -> Iterator[Any]:
    """Each with definitions of its own: one for each tool."""
    yield from value if isinstance(value, list) else (value,)


class _References:
    """How many values the references of a schema stand for, written out to the end; none is. Definitions are known by
    their last name, as litellm knows them, wherever they stand."""

    def __init__(self, schema: Any) -> None:
        self._named = _definitions(schema)
        self._sizes: dict[str, int | None] = {}
        self._read = 0

    def size(self, value: Any) -> int | None:
        """None where one comes back to itself, and so has no end. Once it is too large, how large is not found out."""
        total = 0
        for name in _names_in(value):
            if (size := self._of_name(name)) is None:
                return None
            total += size
            if max(total, self._read) > MAX_WRITTEN_OUT:
                return MAX_WRITTEN_OUT + 1
        return total

    def _of_name(self, name: str) -> int | None:
        if name not in self._sizes:
            # Until it is known: a reference that comes back here has no end.
            self._sizes[name] = None
            sizes = [self._whole(one) for one in self._named.get(name, ())]
            self._sizes[name] = None if None in sizes else sum(size or 0 for size in sizes)
        return self._sizes[name]

    def _whole(self, value: Any) -> int | None:
        written = sum(map(_weight, _values_in(value)))
        self._read += written
        size = self.size(value)
        return None if size is None else size + written


def _values_in(value: Any) -> Iterator[Any]:
    """At any depth, itself among them."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one


def _weight(value: Any) -> int:
    texts = value if isinstance(value, dict) else (value,)
    return 1 + sum(len(text) for text in texts if isinstance(text, str)) // CHARACTERS_PER_VALUE


def _names_in(value: Any) -> Iterator[str]:
    for one in _values_in(value):
        if isinstance(one, dict) and isinstance(name := one.get(REF), str):
            yield name.rpartition("/")[2]


def _definitions(schema: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for one in _values_in(schema):
        for name in ("$defs", "definitions") if isinstance(one, dict) else ():
            for key, value in (one[name] if isinstance(one.get(name), dict) else {}).items():
                found.setdefault(key, []).append(value)
    return found
