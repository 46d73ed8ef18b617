"""Whether a model of another provider can be asked at all, found out before anybody asks: litellm makes its smallest
requests, and they are not sent.

Owns what these are, and how it is told why none came to be. Runs in the process of litellm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from guard.proxy.provider_call import Caller
from guard.proxy.provider_clients import Traffic, current
from guard.proxy.provider_keys import Keys
from guard.proxy.provider_link import Model
from guard.proxy.provider_request import CHAT, COMPLETIONS, EMBEDDINGS

SMALLEST: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    EMBEDDINGS: {"input": "hi"},
}

LIMIT_S = 20.0
"""Longest time that one may take; where credentials come from may be slow."""

SAID_CHARACTERS = 300

UNKNOWN = "litellm knows no such provider"
NO_SUCH_API = "LiteLLMUnknownProvider"
"""What litellm raises for an API that a provider does not have."""


async def cannot_be_asked(caller: Caller, model: Model, keys: Keys) -> str | None:
    """Why; None where one of its APIs can be. ``keys``: which the words must not have."""
    try:
        caller.litellm.get_llm_provider(model=model.name, api_base=model.api_base, api_key=model.api_key)
    except Exception:
        return UNKNOWN
    whys = []
    for path, fields in SMALLEST.items():
        if (why := await _why_not(caller, path, fields, model)) is None:
            return None
        whys.append(why)
    said = next((why for why in whys if why != NO_SUCH_API), "it has none of the APIs that are asked for here")
    return keys.hide(said)


async def _why_not(caller: Caller, path: str, fields: Mapping[str, Any], model: Model) -> str | None:
    traffic = Traffic(model.may_ask, dry=True)
    token = current.set(traffic)
    try:
        async with asyncio.timeout(LIMIT_S):
            await caller.ask(path, fields, model)
    except TimeoutError:
        return None
    except Exception as error:
        if traffic.sent:
            return None
        if traffic.strayed is not None:
            return f"litellm would ask {traffic.strayed}, which is neither its api_base nor in may_ask"
        if type(error).__name__ == NO_SUCH_API:
            return NO_SUCH_API
        return " ".join(str(error).partition("Traceback")[0].split())[:SAID_CHARACTERS]
    finally:
        current.reset(token)
    return None
