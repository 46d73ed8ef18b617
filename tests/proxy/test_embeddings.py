"""Several prompts in one request to embed: each is judged by itself, and changed by itself."""

from __future__ import annotations

from typing import Any

import pytest

from detectors import registry
from tests.proxy.conftest import StartProxy
from tests.proxy.detectors import Share, register
from tests.proxy.engine import FakeEngine, running


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


IN_SCOPE = """\
version: 1
name: test
detectors:
  text: {kind: words, scope: user.last}
rules:
  - {name: leak, when: {detector: text, at_least: 0.5}, action: block}
"""


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.parametrize("name", ["messages", "input"])
async def test_of_several_conversations_to_embed_each_is_judged_by_itself(start_proxy: StartProxy, name: str) -> None:
    engine = FakeEngine(body=b'{"object":"list","data":[],"usage":{"prompt_tokens":4,"total_tokens":4}}')
    async with running(engine), start_proxy(engine, IN_SCOPE) as proxy:
        for given, status in (
            ([said("secret", "one"), said("two")], 200),
            # The last turn of the first conversation is no earlier one of the second.
            ([said("a secret"), said("two")], 400),
            ([said("one"), said("secret", "a secret"), said("two")], 400),
        ):
            assert (await proxy.post({"model": "tiny", name: given}, path="/v1/embeddings"))[0] == status, given
        assert engine.bodies == [{"model": "tiny", name: [said("secret", "one"), said("two")]}]
        entries = await proxy.entries(3)
        assert [entry["action"] for entry in entries] == ["allow", "block", "block"]
        assert [entry["scores"] for entry in entries] == [{"text": 0.0}, {"text": 1.0}, {"text": 1.0}]
        assert [entry["rules"] for entry in entries] == [[], ["leak"], ["leak"]]


async def test_of_several_conversations_to_embed_only_those_that_hit_are_redacted(start_proxy: StartProxy) -> None:
    rules = IN_SCOPE.replace("action: block", "action: redact, redact: {messages: [user], replacement: gone}")
    engine = FakeEngine(body=b'{"object":"list","data":[]}')
    async with running(engine), start_proxy(engine, rules) as proxy:
        asked = {"model": "tiny", "messages": [said("one", "a secret"), said("two"), said("three", "secret")]}
        status, headers, _ = await proxy.post(asked, path="/v1/embeddings")
        assert (status, headers["x-guard-action"]) == (200, "redact")
        assert engine.bodies[0]["messages"] == [said("gone", "gone"), said("two"), said("gone", "gone")]
        await proxy.post({"model": "tiny", "input": ["one", "a secret", [5, 6]]}, path="/v1/embeddings")
        assert engine.bodies[1]["input"] == ["one", "gone", [5, 6]]


async def test_many_clean_texts_to_embed_do_not_make_up_for_one_that_is_not(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.BUILT_IN, "share", lambda _path: Share())
    flag = "  - {name: some, when: {detector: text, at_least: 0.2, below: 0.5}, action: flag}\n"
    rules = IN_SCOPE.replace("kind: words, scope: user.last", "kind: share") + flag
    engine = FakeEngine(body=b'{"object":"list","data":[]}')
    async with running(engine), start_proxy(engine, rules) as proxy:
        for last, status in (("bad bad", 400), ("one", 200)):
            given = ["all is well"] * 500 + ["one bad word", last]
            assert (await proxy.post({"model": "tiny", "input": given}, path="/v1/embeddings"))[0] == status
        blocked, flagged = await proxy.entries(2)
        assert (blocked["rule"], blocked["rules"], blocked["scores"]) == ("leak", ["leak", "some"], {"text": 1.0})
        assert (flagged["action"], flagged["scores"]) == ("flag", {"text": pytest.approx(1 / 3)})
