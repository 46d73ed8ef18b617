"""The model reads a conversation of a detector's own, through the same upstream as the request that it is about.

Owns the request for such a pass and what can go wrong with it. Costs the engine the reading of one more prompt, and one
token. Its prompt is made from the conversation: it is never logged. Never decides anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from detectors.base import SecondPass
from guard.mia.results import Readouts
from guard.mia.spec import MiaSpec
from guard.proxy.errors import ApiError
from guard.proxy.upstream import Upstream
from guard.proxy.wire_choices import chat_form

ID_SUFFIX = "-pass"
"""Behind the id of the request that a pass belongs to, so that vLLM's log tells them apart."""

AFFINITY = b"second pass"
"""Its prompts begin with the same examples, which one of several servers may have cached."""


class SecondPassError(Exception):
    """There are no readouts; the message says why, without any text of the conversation."""


@dataclass(frozen=True)
class PassReader:
    """For one request. ``model``: the one that answers. ``headers``: the client's. ``affinity``: equal for passes that
    begin alike."""

    upstream: Upstream
    model: str
    request_id: str
    headers: Mapping[str, str]
    affinity: bytes = AFFINITY

    async def read(self, messages: Sequence[Mapping[str, str]], spec: MiaSpec, suffix: str = ID_SUFFIX) -> Readouts:
        """Raises ``SecondPassError``. Its time is bounded by whoever calls."""
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": 1,
            "temperature": 0,
            "vllm_xargs": {"mia": spec.to_wire()},
        }
        raw = json.dumps(body, separators=(",", ":")).encode("utf-8", "backslashreplace")
        request_id = self.request_id + suffix
        try:
            async with self.upstream.ask(
                chat_form.route, raw, request_id, self.headers, early=False, affinity=self.affinity
            ) as opening:
                whole = await (await opening).whole()  # type: ignore[union-attr]
        except ApiError as error:
            raise SecondPassError(f"the second pass failed: {error}") from error
        if whole.status != 200:
            raise SecondPassError(f"the model server answers the second pass with {whole.status}{_code(whole.body)}")
        for one in whole.readouts():
            if one.stage == "prompt":
                return one
        raise SecondPassError("the engine sent no readouts of the second pass")


def spec_of(asked: SecondPass) -> MiaSpec:
    """What a pass asks of the engine."""
    plan = asked.plan
    return MiaSpec(
        hidden=dict(plan.hidden),
        attention=dict(plan.attention),
        probes={name: probe.capture for name, probe in plan.probes.items()},
    )


def _code(body: bytes) -> str:
    """An error's code, which holds no text of the prompt as its message may."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return ""
    return f" ({code})" if isinstance(code, str | int) else ""
