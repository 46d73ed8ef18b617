"""Models that other providers serve, asked through litellm: the answer comes in the forms in which vLLM's would.

Owns which fields of a request they are sent, and the way from litellm's objects to an answer's bytes. Nothing inside
such a model can be read or steered; what that means is the policy's to say. litellm is loaded only where there is such
a model.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from guard.proxy.answer import Answer, PlainAnswer, StreamedAnswer
from guard.proxy.errors import InvalidRequestError, UpstreamError, UpstreamSilentError
from guard.proxy.loops import VIA
from guard.proxy.provider_file import read_providers
from guard.proxy.provider_media import check_media
from guard.proxy.shown_texts import TOOL_KINDS
from guard.proxy.wire import DATA, DONE, compact
from guard.settings import SettingsError

UNREAD = "another provider serves this model, and nothing inside it can be read"

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

METADATA = "metadata"
"""A field of OpenAI's own too, of chats; litellm takes one of this name for its own and passes it to nobody."""

KEEP_METADATA = ("openai", "azure")
"""Providers, by litellm's names, whose API has that field."""

LIMITS_OF_METADATA = (16, 64, 512)
"""OpenAI's: pairs, and characters of a key and of a value."""

SEARCH = "web_search_options"
FETCHED = "the provider would put into the prompt what nobody reads here"


CONVENTION_NAMES: Mapping[str, str] = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "vertex_ai": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}
"""litellm's name -> the well-known value of ``gen_ai.provider.name``, where they differ."""


class Providers:
    """``path`` None: no such models. Raises ``SettingsError``, with file, line and field."""

    def __init__(self, path: Path | None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._models = {} if path is None else read_providers(path)
        self._keys = {one.api_key_env: _key(path, one.api_key_env) for one in self._models.values() if one.api_key_env}
        self._litellm = _litellm() if self._models else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    @property
    def bases(self) -> tuple[str, ...]:
        """Addresses that are not the providers' own."""
        return tuple(one.api_base for one in self._models.values() if one.api_base)

    def has(self, model: str) -> bool:
        return model in self._models

    def provider_of(self, model: str) -> str:
        """Who serves it, as OpenTelemetry's conventions call them, or else as litellm does."""
        name = self._models[model].model.partition("/")[0]
        return CONVENTION_NAMES.get(name, name)

    @asynccontextmanager
    async def ask(self, path: str, fields: Mapping[str, Any], via: str) -> AsyncIterator[asyncio.Task[Answer]]:
        """As ``Upstream.ask``, of a model that is here. ``via``: the guards that the request came through."""
        reply = _Reply()
        opening = asyncio.create_task(self._open(path, fields, via, reply))
        try:
            yield opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await reply.close()

    async def _open(self, path: str, fields: Mapping[str, Any], via: str, reply: _Reply) -> Answer:
        model = self._models[fields["model"]]
        call, arguments = self._call(path), _arguments(path, fields, model.model.partition("/")[0])
        arguments |= {"model": model.model, "timeout": self._timeout_s, "max_retries": 0, "num_retries": 0}
        arguments["api_key"] = self._keys.get(model.api_key_env or "")
        arguments["api_base"] = model.api_base
        # A provider's own address leads nowhere else.
        arguments["extra_headers"] = {VIA: via} if model.api_base else None
        try:
            result = await call(**{name: value for name, value in arguments.items() if value is not None})
        except TimeoutError:
            raise UpstreamSilentError("the provider did not answer in time") from None
        except Exception as error:
            return PlainAnswer(reply.failed(error))
        return reply.answer(result, fields["model"], streamed=fields.get("stream") is True)

    def _call(self, path: str) -> Callable[..., Awaitable[Any]]:
        calls = {CHAT: "acompletion", COMPLETIONS: "atext_completion", EMBEDDINGS: "aembedding"}
        if path not in calls:
            raise InvalidRequestError(f"another provider serves this model: ask it by {', '.join(calls)}", "model")
        call: Callable[..., Awaitable[Any]] = getattr(self._litellm, calls[path])
        return call


def _arguments(path: str, fields: Mapping[str, Any], provider: str) -> dict[str, Any]:
    """Raises ``InvalidRequestError`` for a field that the provider would not get: a silence there is no answer; and for
    what it would fetch by itself."""
    sent, beside = SENT.get(path, ()), {METADATA} if path == CHAT and provider in KEEP_METADATA else set()
    _check_fetches_nothing(fields)
    check_media(provider, fields)
    if unknown := sorted(fields.keys() - {*sent, *beside, "model"}):
        name = unknown[0]
        raise InvalidRequestError(f"{name} is not passed to the other provider that serves this model", name)
    arguments = {name: value for name, value in fields.items() if name in sent and value is not None}
    if fields.get(METADATA) is not None:
        arguments["extra_body"] = {METADATA: _metadata(fields[METADATA])}
    return arguments


def _check_fetches_nothing(fields: Mapping[str, Any]) -> None:
    """Raises ``InvalidRequestError`` for tools that the provider would call itself."""
    if fields.get(SEARCH) is not None:
        raise InvalidRequestError(f"{SEARCH}: {FETCHED}", SEARCH)
    tools = fields.get("tools")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict) or tool.get("type") not in TOOL_KINDS:
            where = f"tools[{i}]"
            raise InvalidRequestError(f"{where} must be of type {' or '.join(TOOL_KINDS)}: {FETCHED}", where)


def _metadata(given: Any) -> dict[str, str]:
    """Raises ``InvalidRequestError`` for what is not as OpenAI's API has it."""
    pairs = given.items() if isinstance(given, dict) else None
    if pairs is None or not all(isinstance(value, str) for _, value in pairs):
        raise InvalidRequestError("metadata must be an object of texts", METADATA)
    longest = (max(map(len, part), default=0) for part in (given, given.values()))
    if any(size > most for size, most in zip((len(given), *longest), LIMITS_OF_METADATA, strict=True)):
        raise InvalidRequestError(
            "metadata may have {} pairs, keys of {} and values of {} characters".format(*LIMITS_OF_METADATA), METADATA
        )
    return dict(given)


class _Reply:
    """What litellm returned, with the face of an HTTP response."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {"content-type": "application/json"}
        self.content = _Content()

    def answer(self, result: Any, model: str, *, streamed: bool) -> Answer:
        if streamed:
            self.headers["content-type"] = "text/event-stream; charset=utf-8"
            self.content.stream(result, model)
            return StreamedAnswer(self)
        self.content.whole(compact(_fields_of(result, model)))
        return PlainAnswer(self)

    def failed(self, error: Exception) -> _Reply:
        """The provider's status and words, unless they are about our key, which is nothing of the client's."""
        status = getattr(error, "status_code", None)
        if not isinstance(status, int) or status < 400 or status in (401, 403):
            raise UpstreamError("the provider of this model cannot be asked") from error
        self.status = status
        self.content.whole(compact({"error": _error_of(error)}))
        return self

    async def close(self) -> None:
        await self.content.close()


class _Content:
    """Bytes as ``aiohttp.StreamReader.readany`` gives them: some, and none at the end."""

    def __init__(self) -> None:
        self._whole = b""
        self._chunks: Any = None
        self._model = ""

    def whole(self, body: bytes) -> None:
        self._whole = body

    def stream(self, chunks: Any, model: str) -> None:
        self._chunks, self._model = chunks, model

    async def readany(self) -> bytes:
        if self._chunks is None:
            body, self._whole = self._whole, b""
            return body
        try:
            chunk = await anext(self._chunks, None)
        except TimeoutError:
            raise UpstreamSilentError("the provider did not answer in time") from None
        except Exception as error:
            raise UpstreamError("the provider's answer broke off") from error
        if chunk is None:
            self._chunks = None
            return DATA + b" " + DONE + b"\n\n"
        return DATA + b" " + compact(_fields_of(chunk, self._model)) + b"\n\n"

    async def close(self) -> None:
        """Ends the request, if it has not ended: the provider stops generating."""
        if self._chunks is not None:
            await self._chunks.aclose()


def _fields_of(result: Any, model: str) -> dict[str, Any]:
    """litellm's object as OpenAI's JSON, under the name that the client asked for."""
    fields: dict[str, Any] = json.loads(result.model_dump_json(exclude_none=True))
    for choice in fields.get("choices", ()):
        choice.setdefault("finish_reason", None)
        choice.pop("provider_specific_fields", None)
    return {**fields, "model": model}


def _error_of(error: Exception) -> dict[str, Any]:
    given = {name: getattr(error, name, None) for name in ("type", "param", "code")}
    texts = {name: value if isinstance(value, str) else None for name, value in given.items()}
    return {"message": str(getattr(error, "message", "the provider refused the request")), **texts}


def _key(path: Path | None, name: str) -> str:
    key = os.environ.get(name)
    if not key:
        raise SettingsError(f"{path}: the environment has no {name}, which is to hold a provider's key")
    return key


def _litellm() -> Any:
    # Otherwise importing it fetches a list of prices from the network, and a client's picture is fetched by us.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("MAX_IMAGE_URL_DOWNLOAD_SIZE_MB", "0")
    try:
        import litellm
    except ModuleNotFoundError as error:
        if error.name != "litellm":
            raise
        raise SettingsError("providers (GUARD_PROVIDERS): needs litellm: pip install 'mia-guard[litellm]'") from None
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm
