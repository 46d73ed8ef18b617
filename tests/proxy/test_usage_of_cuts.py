"""What an answer that the guard ends says of its tokens, in every API: what is known, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.conftest import BLOCKED, StartProxy
from tests.proxy.detectors import register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_endpoints import CHAT, COMPLETIONS, MESSAGES, RESPONSES, body_of, both, every, streams, whole
from tests.proxy.test_streaming import LEAK, TEXT_ALONE, policy

REFUSING = "respond: refusal, message: Not this."
PROMPT_ALONE = f"""\
version: 1
name: test
detectors: {{text: {{kind: words}}}}
rules: [{{name: leak, when: {{detector: text, at_least: 0.5}}, action: block, {REFUSING}}}]
"""
AT_THE_END = policy("hold", stage="output", more="    respond: refusal\n    message: Not this.\n")


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def asking(route: str, stream: bool, text: str = "private words") -> dict[str, Any]:
    body = json.loads(json.dumps(body_of(route, stream)).replace("private words", text))
    return body | ({"stream_options": {"include_usage": True}} if stream and route in (CHAT, COMPLETIONS) else {})


def usages(route: str, stream: bool, raw: bytes) -> Any:
    """What is said last of tokens, as (of the prompt, of the answer); of a prompt that is not told None."""
    values = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")] if stream else []
    values = values or [json.loads(raw)]
    if route == RESPONSES:
        values = [values[-1].get("response", values[-1])]
        assert "usage" in values[0], "the field is there, whatever is known"
    told = [one["usage"] for one in values if one.get("usage")]
    if not told:
        return None
    prompt, answer = told[-1].get("prompt_tokens", told[-1].get("input_tokens")), told[-1].get("completion_tokens")
    answer = told[-1].get("output_tokens") if answer is None else answer
    assert told[-1].get("total_tokens", (prompt or 0) + answer) == (prompt or 0) + answer
    return prompt, answer


@every
@both
async def test_a_prompt_that_no_model_was_sent_has_used_nothing(
    start_proxy: StartProxy, route: str, stream: bool
) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_ALONE) as proxy:
        status, _, raw = await proxy.post(asking(route, stream, "the secret"), path=route)
        assert (status, engine.bodies) == (200, [])
        assert b"Not this." in raw
        assert usages(route, stream, raw) == (0, 0)


@every
@both
async def test_an_answer_that_is_refused_at_its_end_has_its_prompts_tokens(
    start_proxy: StartProxy, route: str, stream: bool
) -> None:
    engine = FakeEngine(frames=streams(route, LEAK), body=whole(route, "".join(LEAK)))
    async with running(engine), start_proxy(engine, AT_THE_END) as proxy:
        raw = (await proxy.post(asking(route, stream), path=route))[2]
        assert b"Not this." in raw
        # Of raw prompts nothing is read, and this stream tells no usage.
        assert usages(route, stream, raw) == (None if route == COMPLETIONS and stream else (7, 0))


@every
async def test_a_stream_that_is_cut_says_how_long_its_prompt_was_or_says_no_number(
    start_proxy: StartProxy, route: str
) -> None:
    for text, known in ((policy("window"), route != COMPLETIONS), (TEXT_ALONE, False)):
        engine = FakeEngine(frames=streams(route, LEAK), word_delay_s=0.01)
        if route == MESSAGES:
            engine.frames = [one.replace(b'"input_tokens":7,', b"") for one in engine.frames or ()]
        async with running(engine), start_proxy(engine, text) as proxy:
            raw = (await proxy.post(asking(route, True), path=route))[2]
            assert b"content_filter" in raw or b'"stop_reason":"refusal"' in raw
            told = usages(route, True, raw)
            if known or route == MESSAGES:
                prompt, answer = told
                assert (prompt, answer > 0) == (7 if known else None, True)
            else:
                assert told is None
            proxy.ledger.write_text("")


async def test_of_a_prompt_that_was_redacted_the_old_length_is_not_told(start_proxy: StartProxy) -> None:
    redacting = policy("window").replace(
        "action: block, on_error: allow}", "action: redact, redact: {messages: [user]}, on_error: allow}"
    )
    engine = FakeEngine(logit=BLOCKED, frames=streams(RESPONSES, LEAK), word_delay_s=0.01)
    async with running(engine), start_proxy(engine, redacting) as proxy:
        raw = (await proxy.post(asking(RESPONSES, True), path=RESPONSES))[2]
        assert len(engine.bodies) == 2
        assert b"private words" not in json.dumps(engine.bodies[1]).encode()
        assert b"response.incomplete" in raw
        assert usages(RESPONSES, True, raw) is None
        # Charged is what it can have been at most.
        tokens = (await proxy.entry())["tokens"]
        assert tokens["prompt"] is None
        assert tokens["charged"] > tokens["completion"]
