"""The one guardrail of the LiteLLM proxy that is measured: a pattern looked for in every message. For LiteLLM's own
environment; nothing of ours is imported."""

import re
from typing import Any

from fastapi import HTTPException
from litellm.integrations.custom_guardrail import CustomGuardrail

FORBIDDEN = re.compile(r"ignore (all )?previous instructions|\d{16}", re.IGNORECASE)


class Words(CustomGuardrail):  # type: ignore[misc]
    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        for message in data.get("messages") or ():
            content = message.get("content")
            if isinstance(content, str) and FORBIDDEN.search(content):
                raise HTTPException(400, {"error": "forbidden words"})
        return data
