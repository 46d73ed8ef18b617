"""A closer look at one request: its prompt and its answer read once more, with every detector at every token.

Owns the request for that reading. It costs the engine one more prompt and one token, twice that where it has no room
for all rows at once, and is done when somebody asks to see it, never for live traffic. Live requests are read where
their detectors need it; what stands at other tokens is nowhere until then. Prompt and answer go in as tokens, so that
they stand exactly where they stood.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from detectors.base import CapturePlan, Score, TokenReader
from guard.console.contents import Content
from guard.console.token_texts import token_texts
from guard.mia.results import Readout, Readouts
from guard.mia.spec import MiaSpec, TokenRanges
from guard.policy import BoundPolicy
from guard.proxy.errors import InvalidRequestError, UpstreamError
from guard.proxy.services import Services
from guard.proxy.wire_choices import completions_form

ID_SUFFIX = "-inspect"
MAX_TOKENS = 4096
"""Longest prompt and answer together that are looked at."""

RENDERED = ("model", "messages", "tools", "chat_template_kwargs", "mm_processor_kwargs")
"""Fields of a chat request that its prompt is made from."""

_NOTHING = Score("unavailable", reason="no detector of this policy reads tokens")

ROWS_AT_ONCE = 128
"""Tokens read in one pass where an engine has no room for all: it has room for one of each request in a step, which is
rarely less than this. Passes begin at multiples of it, where blocks of its prefix cache end, so that none computes
again what stands before it."""


@dataclass(frozen=True)
class Layer:
    """One way to colour the tokens. ``values``: one a token, None where nothing was read. ``from_``: for attention,
    what looks: ``prompt`` (its last token) or ``answer``. ``reason``: why there are no values."""

    detector: str
    kind: str
    looks_back: bool
    from_: str
    values: Sequence[float | None]
    reason: str = ""

    def to_wire(self) -> dict[str, Any]:
        return {
            "detector": self.detector,
            "kind": self.kind,
            "looks_back": self.looks_back,
            "from": self.from_,
            "values": self.values,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Tokens:
    """Of prompt and answer. ``texts``: one a token; ``answer_from``: where the answer begins."""

    ids: Sequence[int]
    texts: Sequence[str]
    answer_from: int


_Values = dict[int, float] | Score
"""By position; a ``Score`` says why there are none."""


@dataclass(frozen=True)
class _Look:
    """One detector read at some tokens. ``key`` begins the names of its captures."""

    key: str
    name: str
    detector: TokenReader
    kind: str
    from_: str
    start: int
    end: int

    @property
    def plan(self) -> CapturePlan:
        return self.detector.token_plan(TokenRanges(tokens=((self.start, self.end),)))

    def within(self, start: int, end: int) -> _Look | None:
        """The same at its tokens in ``[start, end)``; None where it has none there."""
        first, last = max(start, self.start), min(end, self.end)
        return replace(self, start=first, end=last) if first < last else None


async def inspect(services: Services, policy: BoundPolicy, content: Content, request_id: str) -> dict[str, Any]:
    """Tokens and layers, and ``changes``: why these are not of the text that was judged. Raises ``ApiError`` when they
    cannot be had."""
    reading = _Reading(services, request_id + ID_SUFFIX, str(content.fields.get("model")))
    if reason := services.unread(reading.model):
        raise InvalidRequestError(f"nothing can be read inside this model: {reason}")
    tokens = await reading.tokens(content)
    layers = await reading.layers(_looks(policy, tokens), tokens)
    return {
        "tokens": list(tokens.texts),
        "answer_from": tokens.answer_from,
        "changes": list(content.changes),
        "layers": [one.to_wire() for one in layers],
    }


def _looks(policy: BoundPolicy, tokens: Tokens) -> list[_Look]:
    """Of single tokens: all, or the answer's if the detector is for that. Of attention: what the prompt's last token
    and the answer looked at."""
    begins, end = tokens.answer_from, len(tokens.ids)
    looks: list[_Look] = []
    for name, detector in policy.detectors.items():
        if not isinstance(detector, TokenReader):
            continue
        kind = detector.kind
        if not detector.looks_back:
            start = begins if policy.measurements[name].reads_answer else 0
            if start < end:
                looks.append(_Look(f"i{len(looks)}", name, detector, kind, "", start, end))
            continue
        looks.append(_Look(f"i{len(looks)}", name, detector, kind, "prompt", begins - 1, begins))
        if end > begins:
            looks.append(_Look(f"i{len(looks)}", name, detector, kind, "answer", begins, end))
    return looks


@dataclass(frozen=True)
class _Reading:
    services: Services
    request_id: str
    model: str

    async def tokens(self, content: Content) -> Tokens:
        prompt = {name: content.fields[name] for name in RENDERED if name in content.fields}
        ids, names = await self._tokenized(prompt)
        begins = len(ids)
        if content.answer:
            asked = {"model": self.model, "prompt": content.answer, "add_special_tokens": False}
            more_ids, more_names = await self._tokenized(asked)
            ids, names = [*ids, *more_ids], [*names, *more_names]
        if len(ids) > MAX_TOKENS:
            raise InvalidRequestError(f"prompt and answer have {len(ids)} tokens; at most {MAX_TOKENS} are looked at")
        return Tokens(ids, token_texts(names), begins)

    async def layers(self, looks: Sequence[_Look], tokens: Tokens) -> list[Layer]:
        """All in one reading if the engine can do that; what it had no room for, or no tap, is then read apart."""
        ids = tokens.ids
        readouts = await self._read(looks, ids) if looks else _NOTHING
        found = {look.key: _values(look, readouts) for look in looks}
        lacking = [look for look in looks if isinstance(found[look.key], Score)]
        found |= await self._apart(lacking, ids, refused=isinstance(readouts, Score))
        return [_layer(look, found[look.key], len(ids)) for look in looks]

    async def _apart(self, looks: Sequence[_Look], ids: Sequence[int], *, refused: bool) -> dict[str, _Values]:
        """In as many readings as it takes. ``refused``: all were, perhaps for what one of them asks, so each goes
        alone. Attention is a mean over its tokens and stays whole."""
        found: dict[str, _Values] = {}
        rows = [look for look in looks if not look.detector.looks_back]
        for group in [[look] for look in rows] if refused else [rows]:
            found |= await self._in_parts(group, ids)
        for look in looks:
            if look.detector.looks_back:
                found[look.key] = _values(look, await self._read([look], ids))
        return found

    async def _in_parts(self, looks: Sequence[_Look], ids: Sequence[int]) -> dict[str, _Values]:
        """Of single tokens, part by part. A part ends the prompt, since no token sees those behind it; what stands
        before it has just been computed, and comes from the engine's prefix cache."""
        found: dict[str, _Values] = {look.key: {} for look in looks}
        for start in range(0, len(ids), ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, len(ids))
            going = [look for look in looks if not isinstance(found[look.key], Score)]
            if parts := [part for look in going if (part := look.within(start, end)) is not None]:
                readouts = await self._read(parts, ids[:end])
                for part in parts:
                    values, before = _values(part, readouts), found[part.key]
                    assert not isinstance(before, Score)
                    found[part.key] = values if isinstance(values, Score) else before | values
        return found

    async def _read(self, looks: Sequence[_Look], ids: Sequence[int]) -> Readouts | Score:
        """One prompt read; a ``Score`` says why nothing came of it."""
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "vllm_xargs": {"mia": _spec(looks).to_wire()},
        }
        async with self.services.upstream.ask(
            completions_form.route, json.dumps(body).encode(), self.request_id, {}, early=False
        ) as opening:
            whole = await (await opening).whole()  # type: ignore[union-attr]
        if whole.status != 200:
            return Score("unavailable", reason=f"the engine refuses: {_message(whole.body)}")
        found = next((one for one in whole.readouts() if one.stage == "prompt"), None)
        return found or Score("unavailable", reason="the engine sent no readouts of the prompt")

    async def _tokenized(self, asked: Mapping[str, Any]) -> tuple[list[int], list[str]]:
        """Ids and names. Raises ``UpstreamError``."""
        body = json.dumps({**asked, "return_token_strs": True}).encode()
        async with self.services.upstream.forward(
            "POST", "/tokenize", body, self.request_id, "application/json"
        ) as answer:
            raw = b"".join([chunk async for chunk in answer.chunks()])
        try:
            told = json.loads(raw)
            ids, names = [int(one) for one in told["tokens"]], [str(one) for one in told["token_strs"]]
        except (ValueError, LookupError, TypeError):
            raise UpstreamError(f"the model server does not tokenize this prompt ({answer.status})") from None
        if answer.status != 200 or len(ids) != len(names):
            raise UpstreamError(f"the model server does not tokenize this prompt ({answer.status})")
        return ids, names


def _spec(looks: Sequence[_Look]) -> MiaSpec:
    plans = [(look.key, look.plan) for look in looks]
    return MiaSpec(
        hidden={f"{key}.{name}": capture for key, plan in plans for name, capture in plan.hidden.items()},
        attention={f"{key}.{name}": capture for key, plan in plans for name, capture in plan.attention.items()},
        probes={f"{key}.{name}": probe.capture for key, plan in plans for name, probe in plan.probes.items()},
    )


def _layer(look: _Look, values: _Values, length: int) -> Layer:
    """``length``: of prompt and answer, in tokens."""
    reason = values.reason if isinstance(values, Score) else ""
    filled = [] if isinstance(values, Score) else [values.get(at) for at in range(length)]
    return Layer(look.name, look.kind, look.detector.looks_back, look.from_, filled, reason)


def _values(look: _Look, readouts: Readouts | Score) -> _Values:
    if isinstance(readouts, Score):
        return readouts
    prefix = f"{look.key}."
    own: dict[str, Readout] = {
        name.removeprefix(prefix): item for name, item in readouts.items.items() if name.startswith(prefix)
    }
    read = look.detector.token_values(own)
    if isinstance(read, Score):
        return read
    # Nobody attends to what comes later; that is not the same as a little.
    return {at: value for at, value in zip(read.positions, read.values, strict=True) if at < look.end}


def _message(body: bytes) -> str:
    """What an error says to whoever may see this prompt anyway."""
    try:
        return str(json.loads(body)["error"]["message"])[:400]
    except (ValueError, LookupError, TypeError):
        return "it does not say why"
