"""The prefix cache: which of its blocks a request that is read or steered may share with others.

Relies on (vLLM 0.29): kv_cache_utils._gen_prompt_embeds_extra_hash_keys, which vLLM asks for every block's extra keys;
KVCacheManager.get_computed_blocks, which looks for at most ``Request.num_tokens`` - 1 tokens;
Request.sampling_params. A block before the first steered token keeps vLLM's own hash, so that it is shared with
everybody; hashes are chained, so the key of the first touched block also marks all that follow it. Tokens of cached
blocks never pass the taps, so a request takes only blocks before the first token that it reads.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager

from guard.mia.patching import wrap


def install() -> None:
    """Wrap the functions. Safe to call once per process, before any engine exists."""
    wrap(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", _extra_keys)
    wrap(KVCacheManager, "get_computed_blocks", _computed_blocks)


def _extra_keys(original: Any, request: Any, start_token_idx: int, end_token_idx: int) -> list[Any]:
    keys: list[Any] = original(request, start_token_idx, end_token_idx)
    asked = _asked(request)
    if asked is not None and asked["steered_from"] is not None and asked["steered_from"] < end_token_idx:
        return [*keys, asked["steering_key"]]
    return keys


class _Shorter:
    """A request as the look-up sees it, of which only the tokens before ``read_from`` may come from the cache."""

    def __init__(self, request: Any, read_from: int) -> None:
        self._request = request
        # The look-up always leaves a token to be computed.
        self.num_tokens = min(request.num_tokens, read_from + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _computed_blocks(original: Any, manager: KVCacheManager, request: Any) -> Any:
    asked = _asked(request)
    if asked is None or asked["read_from"] is None:
        return original(manager, request)
    return original(manager, _Shorter(request, asked["read_from"]))


def _asked(request: Any) -> Any:
    """What ``frontend`` says of a request's spec; None without one."""
    params = request.sampling_params
    return (params.extra_args or {}).get("mia") if params is not None else None
