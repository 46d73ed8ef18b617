"""Prefix-cache blocks that steering has touched are shared only among requests that are steered alike.

Relies on (vLLM 0.29): kv_cache_utils._gen_prompt_embeds_extra_hash_keys, which vLLM asks for every block's extra keys;
Request.sampling_params. A block before the first steered token keeps vLLM's own hash, so that it is shared with
everybody; hashes are chained, so the key of the first touched block also marks all that follow it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core import kv_cache_utils

from guard.mia.patching import wrap


def install() -> None:
    """Wrap the function. Safe to call once per process, before any engine exists."""
    wrap(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", _extra_keys)


def _extra_keys(original: Any, request: Any, start_token_idx: int, end_token_idx: int) -> list[Any]:
    keys: list[Any] = original(request, start_token_idx, end_token_idx)
    params = request.sampling_params
    asked = (params.extra_args or {}).get("mia") if params is not None else None
    if asked is not None and asked["steered_from"] is not None and asked["steered_from"] < end_token_idx:
        return [*keys, asked["steering_key"]]
    return keys
