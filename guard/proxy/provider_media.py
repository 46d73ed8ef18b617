"""Pictures, sounds, videos and files in requests to other providers' models: which of them litellm sends on.

Owns the table, as measured with litellm 1.108.7 by ``tests/proxy/test_provider_media.py``. What litellm would leave out
without a word, or fetch by itself, is refused: a silence there is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from guard.proxy.errors import InvalidRequestError
from guard.proxy.shown_texts import FILE, FILES, PICTURED, SOURCE

IMAGE, SOUND, AS_DATA = "image_url", "input_audio", "data:"

AS_THEY_ARE = frozenset(
    (
        *("openai", "azure", "hosted_vllm", "litellm_proxy", "groq", "xai", "openrouter", "together_ai", "perplexity"),
        *("fireworks_ai", "huggingface", "cohere_chat"),
    )
)
"""Providers, by litellm's names, who get every part as the client sent it."""

ONLY: Mapping[str, frozenset[str]] = {
    "anthropic": frozenset((FILE, SOURCE)),
    "gemini": frozenset((SOUND, FILE)),
    "mistral": frozenset((IMAGE, FILE)),
    "ollama_chat": frozenset((IMAGE,)),
    "ollama": frozenset(),
    "azure_ai": frozenset((IMAGE, SOUND)),
    "deepseek": frozenset(),
}
"""Fields of parts that these get. A picture in the request itself all get but ``BLIND``; of providers in neither table
no more is known."""

BLIND = frozenset(("deepseek",))

ADDRESS = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")


def check_media(provider: str, fields: Mapping[str, Any]) -> None:
    """``provider``: litellm's name. Raises ``InvalidRequestError`` for a part that it would not get."""
    for where, part in _parts(fields.get("messages")):
        _check_no_address(where, part)
        if provider in AS_THEY_ARE:
            continue
        for name in sorted(part.keys() & (PICTURED | {SOURCE})):
            if not _is_sent(provider, part, name):
                seen = name == IMAGE and provider not in BLIND
                remedy = "send the picture itself, as a data: URL" if seen else "leave it out"
                raise InvalidRequestError(
                    f"{where}.{name} does not reach models of {provider}: {remedy}", f"{where}.{name}"
                )


def _check_no_address(where: str, part: Mapping[str, Any]) -> None:
    """Of whatever provider, litellm fetches files by their addresses, or has it do so."""
    for place, held in ((where, part), (f"{where}.{FILE}", part.get(FILE))):
        for name in FILES:
            value = held.get(name) if isinstance(held, dict) else None
            if isinstance(value, str) and ADDRESS.match(value):
                raise InvalidRequestError(
                    f"{place}.{name} is an address, which nobody here may fetch: send the file itself, as file_data",
                    f"{place}.{name}",
                )


def _is_sent(provider: str, part: Mapping[str, Any], name: str) -> bool:
    if name == SOURCE and part.get("type") != "document":
        return False
    picture = name == IMAGE and provider not in BLIND and _is_data(part[name])
    return picture or name in ONLY.get(provider, ())


def _parts(messages: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                yield f"messages[{i}].content[{j}]", part


def _is_data(image: Any) -> bool:
    url = image.get("url") if isinstance(image, dict) else image
    return isinstance(url, str) and url.startswith(AS_DATA)
