"""One request to a provider, by litellm: the call, its chunks as they come, and why it failed.

Owns how litellm is set up. Runs in a process of its own (``provider_worker``); no other asks litellm for anything.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from guard.proxy.provider_clients import FIRST_FAILED, Traffic, watch_clients
from guard.proxy.provider_error import (
    LEFT_OUT,
    NO_FORM,
    OURS,
    SILENT,
    STRAYED,
    UNREACHED,
    UNREADABLE,
    Failure,
    answered,
    refused,
    unavailable,
    untaken,
)
from guard.proxy.provider_link import Model
from guard.proxy.provider_request import CHAT, COMPLETIONS, EMBEDDINGS, arguments

CALLS: Mapping[str, str] = {CHAT: "acompletion", COMPLETIONS: "atext_completion", EMBEDDINGS: "aembedding"}

TOO_MUCH = "this request takes more memory than the providers' process may have"

KEYLESS = re.compile(r"(?i)credentials|api[ _]key")
"""In words of litellm's where it has no key for an API. It tells this with whatever kind and status."""

END = object()


@dataclass(frozen=True)
class Caller:
    litellm: Any

    async def ask(self, path: str, fields: Mapping[str, Any], model: Model) -> Any:
        """litellm's answer, or its stream. Raises whatever it raises."""
        given = arguments(path, fields)
        given |= {"model": model.name, "timeout": model.timeout_s, "max_retries": 0, "num_retries": 0}
        given |= {"api_key": model.api_key, "api_base": model.api_base}
        given["extra_headers"] = {"via": model.via} if model.via else None
        call = getattr(self.litellm, CALLS[path])
        return await call(**{name: value for name, value in given.items() if value is not None})


async def opened(stream: Any) -> Any:
    """What the provider's chunks come from: litellm's own wrapping tells no choice but the first how it ended, gives
    an end to what broke off, and counts tokens."""
    while hasattr(stream, "completion_stream"):
        if stream.completion_stream is None:
            await stream.fetch_stream()
        stream = stream.completion_stream
    return stream


async def chunks_of(source: Any) -> AsyncIterator[Any]:
    """Of either kind of iterator."""
    if hasattr(source, "__aiter__"):
        async for chunk in source:
            if _is_chunk(chunk):
                yield chunk
        return
    iterator = iter(source)
    while (chunk := await asyncio.to_thread(next, iterator, END)) is not END:
        if _is_chunk(chunk):
            yield chunk


def _is_chunk(value: Any) -> bool:
    """Where a provider says what is no part of an answer, there is nothing, or this word for it."""
    return value is not None and value != "None"


def failure_of(error: Exception, traffic: Traffic, fields: Mapping[str, Any]) -> Failure:
    """Told by what was heard of the provider, as far as anything was: litellm's own words and kinds say less."""
    late = isinstance(error, TimeoutError) or "Timeout" in type(error).__name__
    if isinstance(error, MemoryError):
        return refused(TOO_MUCH)
    if traffic.strayed is not None and not traffic.sent:
        return refused(STRAYED, "model")
    if traffic.unsent is not None:
        return refused(f"{traffic.unsent}: {LEFT_OUT}", traffic.unsent)
    response = traffic.response
    if response is not None and response.status_code >= FIRST_FAILED:
        return answered(response.status_code, response.headers, traffic.body())
    if traffic.sent and response is not None and not traffic.carried:
        return refused(NO_FORM)
    if traffic.sent and late:
        return unavailable(SILENT, 504)
    if traffic.sent:
        return unavailable(UNREACHED if response is None else UNREADABLE)
    if getattr(error, "status_code", None) in (401, 403) or KEYLESS.search(str(error)):
        return unavailable(OURS)
    return untaken(str(error), list(fields))


def litellm_caller() -> Caller:
    """Loads litellm, which takes seconds."""
    # Otherwise importing it fetches a list of prices from the network, and a client's picture is fetched by us.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("MAX_IMAGE_URL_DOWNLOAD_SIZE_MB", "0")
    # Seconds: shorter than most servers keep connections. What is sent on one that is just being closed is lost, since
    # nothing is sent twice.
    os.environ.setdefault("AIOHTTP_KEEPALIVE_TIMEOUT", "4")
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    # It would fetch tokenizers, and make up a usage that the provider did not tell.
    litellm.disable_token_counter = True
    litellm.disable_hf_tokenizer_download = True
    watch_clients()
    return Caller(litellm)
