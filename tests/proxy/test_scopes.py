"""Every text of a request is somebody's: what a tool returned, or what a user said, in whichever field it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from guard.policy import load_policy
from guard.policy.compiled import compile_rules
from guard.policy.judged_paths import EMBEDDINGS
from guard.policy.recorded import read_ledger
from guard.policy.replay import replay
from tests.proxy.conftest import BLOCKED, BODY, CLEAN, FLAGGED, POLICY, StartProxy
from tests.proxy.detectors import register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_bypass import PROMPT_RULE, outcomes
from tests.proxy.test_endpoints import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, whole

DOCUMENTS = [{"title": "t", "text": "secret"}]
SAYS = {"model": "tiny", "input": [{"role": "user", "content": "a"}]}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": [*SAYS["input"], {"type": kind, **fields}]}


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {**BODIES[MESSAGES], "messages": [{"role": role, "content": list(content)}]}


OF_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "documents": (CHAT, {**BODY, "documents": DOCUMENTS}),
    "documents for the template": (CHAT, {**BODY, "chat_template_kwargs": {"documents": DOCUMENTS}}),
    "documents as a text": (CHAT, {**BODY, "chat_template_kwargs": {"documents": "secret"}}),
    "documents of responses": (RESPONSES, {**SAYS, "chat_template_kwargs": {"documents": DOCUMENTS}}),
    "documents to embed with": (EMBEDDINGS, {**BODY, "documents": DOCUMENTS}),
    "an item": (RESPONSES, item("function_call_output", call_id="1", output="secret")),
    "parts of an item": (
        RESPONSES, item("function_call_output", call_id="1", output=[{"type": "input_text", "text": "secret"}]),
    ),
    "a block": (MESSAGES, blocks({"type": "tool_result", "tool_use_id": "1", "content": "secret"})),
    "a search's result": (MESSAGES, blocks({"type": "search_result", "content": [{"type": "text", "text": "secret"}]})),
    "a document": (MESSAGES, blocks({"type": "document", "source": {"type": "text", "data": "secret"}})),
    "what a search on the web found": (
        MESSAGES, blocks({"type": "web_search_tool_result", "content": [{"title": "secret"}]}, role="assistant"),
    ),
    "a raw prompt": (COMPLETIONS, {"model": "tiny", "prompt": "secret"}),
    "what follows a raw prompt": (COMPLETIONS, {"model": "tiny", "prompt": "a", "suffix": "secret"}),
    "a text to embed": (EMBEDDINGS, {"model": "tiny", "input": ["a", "secret"]}),
}  # fmt: skip
OF_USERS: dict[str, tuple[str, dict[str, Any]]] = {
    name: OF_TOOLS[name]
    for name in ("a raw prompt", "what follows a raw prompt", "a text to embed")
} | {
    "an argument of the template": (CHAT, {**BODY, "chat_template_kwargs": {"note": "secret"}}),
    "an item": (RESPONSES, {"model": "tiny", "input": [{"role": "user", "content": "secret"}]}),
    "what vLLM leaves out": (
        MESSAGES, blocks({"type": "thinking", "thinking": "secret"}, {"type": "text", "text": "a"}),
    ),
    "a turn that vLLM leaves out": (MESSAGES, blocks({"type": "tool_use", "name": "f", "input": {"a": "secret"}})),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def scoped(scope: str) -> str:
    return PROMPT_RULE.replace("{kind: words}", f"{{kind: words, scope: {scope}}}")


@pytest.mark.parametrize("scope", ["tool", "tool_results", "new_tool_results", "last_turn"])
async def test_what_a_tool_returned_is_its_wherever_it_stands(start_proxy: StartProxy, scope: str) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, scoped(scope)) as proxy:
        assert await outcomes(proxy, OF_TOOLS) == dict.fromkeys(OF_TOOLS, (400, "leak"))


async def test_what_a_user_says_is_the_users_wherever_it_stands(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, scoped("user")) as proxy:
        assert await outcomes(proxy, OF_USERS) == dict.fromkeys(OF_USERS, (400, "leak"))
        others = {name: one for name, one in OF_TOOLS.items() if name not in OF_USERS}
        assert {status for status, _ in (await outcomes(proxy, others)).values()} == {200}


async def test_what_is_redacted_of_tools_is_gone_from_documents(start_proxy: StartProxy) -> None:
    text = PROMPT_RULE.replace("action: block", "action: redact, redact: {messages: [tool_results]}")
    async with running(FakeEngine()) as engine, start_proxy(engine, text) as proxy:
        for name in ("documents", "documents for the template", "documents as a text"):
            path, body = OF_TOOLS[name]
            assert (await proxy.post(body, path=path))[1]["x-guard-action"] == "redact", name
            assert "secret" not in json.dumps(engine.bodies[-1]), name
            assert "private words" in json.dumps(engine.bodies[-1]), name


async def test_documents_take_no_score_from_detectors_that_need_not_know_where_they_are(
    start_proxy: StartProxy,
) -> None:
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, POLICY) as proxy:
        status, headers, _ = await proxy.post({**BODY, "documents": DOCUMENTS})
        assert (status, headers["x-guard-rules"]) == (400, "stop,watch")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        f"an item of type {kind}": (RESPONSES, item(kind, **fields), "input[1].type")
        for kind, fields in {
            "mcp_call": {"output": "a", "role": "user", "content": "b"},
            "file_search_call": {"results": [{"text": "a"}]},
            "web_search_call": {"action": {}},
            "code_interpreter_call": {"outputs": []},
            "computer_call_output": {"output": {}},
            "custom_tool_call_output": {"output": "a", "role": "user", "content": "b"},
            "local_shell_call_output": {"output": "a"},
            "additional_tools": {"role": "developer", "tools": []},
        }.items()
    },
    "an item with a role that is not its": (
        RESPONSES, item("function_call_output", call_id="1", output="a", role="user", content="b"), "input[1].role",
    ),
    "reasoning of a user": (RESPONSES, item("reasoning", summary=[], content="a", role="user"), "input[1].role"),
    "a tool's result of the assistant": (
        MESSAGES, blocks({"type": "tool_result", "tool_use_id": "1", "content": "a"}, role="assistant"),
        "messages[0].content",
    ),
    "a system's message in between": (
        MESSAGES,
        {**BODIES[MESSAGES], "messages": [*BODIES[MESSAGES]["messages"], {"role": "system", "content": "a"}]},
        "messages[1].role",
    ),
    "a system's message and a system prompt": (
        MESSAGES, {**BODIES[MESSAGES], "system": "a", "messages": [{"role": "system", "content": "b"}]},
        "messages[0].role",
    ),
}  # fmt: skip


async def test_what_vllm_reads_as_somebody_elses_is_refused_and_named(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, POLICY) as proxy:
        for name, (path, body, field) in REFUSED.items():
            status, _, raw = await proxy.post(body, path=path)
            error = json.loads(raw)["error"]
            assert status == 400, name
            assert field in error["message"], name
        assert not engine.bodies
        first = {**BODIES[MESSAGES], "messages": [{"role": "system", "content": "a"}, *BODIES[MESSAGES]["messages"]]}
        assert (await proxy.post(first, path=MESSAGES))[0] == 200


BEHIND: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: (CHAT, {**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": "well"}]}),
    RESPONSES: (RESPONSES, {**SAYS, "input": [*SAYS["input"], {"type": "reasoning", "summary": [{"text": "well"}]}]}),
    MESSAGES: (
        MESSAGES,
        {**BODIES[MESSAGES], "messages": [*BODIES[MESSAGES]["messages"], {"role": "assistant", "content": "well"}]},
    ),
    "system": (CHAT, {**BODY, "messages": [*BODY["messages"], {"role": "system", "content": "well"}]}),
    "developer": (RESPONSES, {**SAYS, "input": [*SAYS["input"], {"role": "developer", "content": "well"}]}),
}


@pytest.mark.parametrize("name", list(BEHIND))
async def test_behind_others_words_a_low_score_clears_nothing_and_a_high_one_counts(
    start_proxy: StartProxy, tmp_path: Path, name: str
) -> None:
    path, body = BEHIND[name]
    answer = FakeEngine(body=whole(path, "fine"))
    async with running(answer) as engine, start_proxy(engine, POLICY) as proxy:
        for logit, expected in ((CLEAN, (200, "stop")), (FLAGGED, (200, "stop,watch")), (BLOCKED, (400, "stop,watch"))):
            engine.logit = logit
            status, headers, _ = await proxy.post(body, path=path)
            assert (status, headers["x-guard-rules"]) == expected
        first = (await proxy.entries(3))[0]
        assert first["scores"]["danger"] < 0.01
        assert first["detectors"]["danger"].startswith("scored: the last message is the assistant's")
        assert "at least" in first["reason"]
        loaded = load_policy(tmp_path / "policy.yaml")
        again = replay(loaded, compile_rules(loaded, {}), read_ledger(proxy.ledger))
        assert (again.compared, again.changed()) == (3, 0)
    strict = POLICY.replace("on_error: flag", "on_error: block")
    async with running(answer) as engine, start_proxy(engine, strict) as proxy:
        engine.logit = CLEAN
        assert (await proxy.post(body, path=path))[0] == 503
