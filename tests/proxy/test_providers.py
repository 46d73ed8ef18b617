"""Models that nothing can be read in: those of other providers, through litellm, and of a vLLM without the plugin."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from guard.cli import app
from guard.policy import PolicyError
from guard.settings import SettingsError
from tests.proxy.conftest import BODY, IMPATIENT, Proxy, StartProxy, eventually
from tests.proxy.detectors import register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_tracing import Collector, collecting, values

POLICY = """\
version: 1
name: mixed
detectors:
  danger: {kind: probe}
  leak: {kind: words, config: tiny}
rules:
  - {name: stop, when: {detector: danger, at_least: 0.9}, action: block, on_error: flag}
  - {name: words, when: {detector: leak, at_least: 0.5}, action: block, message: No secrets.}
  - {name: answer, stage: output, when: {detector: leak, at_least: 0.5}, action: block, message: No leaks.}
"""
STRICT = IMPATIENT.replace("on_error: flag", "on_error: block")
PROMPT_ONLY = POLICY.replace("  - {name: answer", "  # {name: answer")
pytestmark = pytest.mark.usefixtures("one_process")

ASKED: dict[str, Any] = {**BODY, "model": "far"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch)
    monkeypatch.setenv("FAR_KEY", "the-providers-key")
    (tmp_path / "model_configs" / "words").mkdir(parents=True)
    (tmp_path / "model_configs" / "words" / "tiny.json").write_text("{}")


@pytest.fixture
def providers(tmp_path: Path) -> Any:
    """Writes the file for models that ``engine`` stands in for."""

    def write(engine: FakeEngine, extra: str = "") -> Path:
        path = tmp_path / "providers.yaml"
        model = f"{{model: openai/far-away, api_base: {engine.url}/v1, api_key_env: FAR_KEY}}"
        path.write_text(f"version: 1\nmodels:\n  far: {model}\n{extra}")
        return path

    return write


def client(proxy: Proxy) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="ours", max_retries=0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_texts_are_judged_and_the_models_inside_is_unavailable(
    start_proxy: StartProxy, providers: Any, stream: bool
) -> None:
    async with running(FakeEngine(finish="stop")) as far, running(FakeEngine()) as near:
        async with start_proxy(near, POLICY, providers=providers(far)) as proxy:
            messages: Any = [{"role": "user", "content": "hello"}]
            options: Any = {"stream_options": {"include_usage": True}} if stream else {}
            answer: Any = await client(proxy).chat.completions.create(
                model="far", messages=messages, stream=stream, **options
            )
            if stream:
                chunks = [chunk async for chunk in answer]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                assert chunks[0].model == "far"
            else:
                text = answer.choices[0].message.content
            assert text == "The answer is 42."
            messages = [{"role": "user", "content": "the secret"}]
            with pytest.raises(openai.BadRequestError, match="No secrets") as blocked:
                await client(proxy).chat.completions.create(model="far", messages=messages, stream=stream)
            assert blocked.value.code == "content_filter"
            first, second = await proxy.entries(2)
        # The provider got its own key and nothing of ours; our vLLM got nothing at all.
        assert [one["authorization"] for one in far.headers] == ["Bearer the-providers-key"]
        assert far.specs == [None]
        assert far.bodies[0]["model"] == "far-away"
        assert near.bodies == []
    assert (first["action"], first["rules"]) == ("flag", ["stop"])
    assert "another provider" in first["detectors"]["danger"]
    assert (second["action"], second["rule"]) == ("block", "words")


async def test_a_span_names_the_provider(start_proxy: StartProxy, providers: Any) -> None:
    async with collecting(Collector()) as collector, running(FakeEngine()) as far, running(FakeEngine()) as near:
        options = {"providers": providers(far), "otlp_endpoint": collector.url}
        async with start_proxy(near, PROMPT_ONLY, **options) as proxy:
            assert (await proxy.post(ASKED))[0] == 200
    told = values(collector.spans["chat far"].attributes)
    assert (told["gen_ai.provider.name"], told["gen_ai.response.model"]) == ("openai", "far")


async def test_an_answer_is_judged_as_vllms_is(start_proxy: StartProxy, providers: Any) -> None:
    async with (
        running(FakeEngine(scripts=[("the", " secret", " 1234")], finish="stop")) as far,
        start_proxy(far, POLICY, providers=providers(far)) as proxy,
    ):
        for stream in (False, True):
            status, _, body = await proxy.post({**ASKED, "stream": stream})
            assert (status, json.loads(body)["error"]["message"]) == (400, "No leaks. (rule answer)")


async def test_a_rule_that_lets_nothing_pass_unmeasured_blocks(start_proxy: StartProxy, providers: Any) -> None:
    async with running(FakeEngine()) as far, start_proxy(far, STRICT, providers=providers(far)) as proxy:
        status, _, body = await proxy.post(ASKED)
        assert (status, json.loads(body)["error"]["code"]) == (503, "guard_unavailable")
        assert far.bodies == []


async def test_other_models_go_to_vllm_and_both_are_listed(start_proxy: StartProxy, providers: Any) -> None:
    async with running(FakeEngine()) as far, running(FakeEngine()) as near:
        async with start_proxy(near, POLICY, providers=providers(far)) as proxy:
            assert (await proxy.post())[0] == 200
            assert [one.id async for one in client(proxy).models.list()] == ["tiny", "far"]
            assert (await client(proxy).models.retrieve("far")).id == "far"
        assert (len(near.bodies), far.bodies) == (1, [])
        assert near.specs[0] is not None


async def test_without_vllm_providers_are_all_there_is(start_proxy: StartProxy, providers: Any) -> None:
    async with running(FakeEngine()) as far, start_proxy(far, POLICY, upstream="", providers=providers(far)) as proxy:
        assert (await proxy.post(ASKED))[0] == 200
        assert (await proxy.get("/readyz"))[0] == 200
        assert [one.id async for one in client(proxy).models.list()] == ["far"]
        status, _, body = await proxy.post()
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "field", ["api_base", "base_url", "api_key", "custom_llm_provider", "mock_response", "metadata"]
)
async def test_what_would_steer_litellm_is_refused_not_passed(
    start_proxy: StartProxy, providers: Any, field: str
) -> None:
    async with running(FakeEngine()) as far, start_proxy(far, POLICY, providers=providers(far)) as proxy:
        status, _, body = await proxy.post({**ASKED, field: "http://127.0.0.1:1"})
        error = json.loads(body)["error"]
        assert (status, error["param"]) == (400, field)
        assert far.bodies == []


FETCHES: dict[str, tuple[dict[str, Any], str]] = {
    "a search": ({"web_search_options": {}}, "web_search_options"),
    "a tool of the provider's": ({"tools": [{"type": "web_search", "name": "web_search"}]}, "tools[0]"),
    "a tool of the provider's without a type": ({"tools": [{"googleSearch": {}}]}, "tools[0]"),
    "one behind another": (
        {"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "code_execution"}]}, "tools[1]",
    ),
}  # fmt: skip


async def test_what_a_provider_would_fetch_unread_is_refused(start_proxy: StartProxy, providers: Any) -> None:
    async with running(FakeEngine()) as far, start_proxy(far, PROMPT_ONLY, providers=providers(far)) as proxy:
        for name, (fields, param) in FETCHES.items():
            status, _, body = await proxy.post({**ASKED, **fields})
            assert (status, json.loads(body)["error"]["param"]) == (400, param), name
        assert far.bodies == []
        own = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        assert (await proxy.post({**ASKED, "tools": [own]}))[0] == 200
        assert far.bodies[0]["tools"] == [own]


async def test_metadata_reaches_a_provider_whose_api_has_it_and_not_litellm(
    start_proxy: StartProxy, providers: Any
) -> None:
    other = "  other: {model: anthropic/far, api_key_env: FAR_KEY}\n"
    async with (
        running(FakeEngine()) as far,
        start_proxy(far, PROMPT_ONLY, providers=providers(far, other)) as proxy,
    ):
        told = {"user_api_key": "x", "tag": "y"}
        for stream in (False, True):
            assert (await proxy.post({**ASKED, "metadata": told, "stream": stream}))[0] == 200
        assert [one["metadata"] for one in far.bodies] == [told, told]
        wrong = ("x", {"a": 1}, {"a": "b" * 513}, {"a" * 65: ""}, {f"{i}": "" for i in range(17)})
        asked: list[dict[str, Any]] = [{**ASKED, "metadata": one} for one in wrong]
        for body in (*asked, {**ASKED, "model": "other", "metadata": told}):
            status, _, raw = await proxy.post(body)
            assert (status, json.loads(raw)["error"]["param"]) == (400, "metadata")
        assert len(far.bodies) == 2


async def test_apis_that_are_not_translated_are_refused(start_proxy: StartProxy, providers: Any) -> None:
    async with running(FakeEngine()) as far, start_proxy(far, POLICY, providers=providers(far)) as proxy:
        status, _, body = await proxy.post({"model": "far", "input": "hello"}, path="/v1/responses")
        assert (status, json.loads(body)["error"]["param"]) == (400, "model")


async def test_errors_keep_their_status_but_not_those_about_our_key(start_proxy: StartProxy, providers: Any) -> None:
    error = {"error": {"message": "the context is too long", "type": "invalid_request_error", "code": "too_long"}}
    async with (
        running(FakeEngine(error=(400, error, {}))) as far,
        start_proxy(far, POLICY, providers=providers(far)) as proxy,
    ):
        status, _, body = await proxy.post(ASKED)
        assert status == 400
        assert "the context is too long" in json.loads(body)["error"]["message"]
        far.error = (401, {"error": {"message": "the-providers-key is wrong"}}, {})
        status, _, body = await proxy.post(ASKED)
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unavailable")
        assert b"the-providers-key" not in body
        assert len(far.bodies) == 2  # nothing was tried again behind the client's back


async def test_a_client_that_leaves_ends_the_providers_stream(start_proxy: StartProxy, providers: Any) -> None:
    async with (
        running(FakeEngine(word_delay_s=0.3)) as far,
        start_proxy(far, IMPATIENT, providers=providers(far)) as proxy,
    ):
        stream = await client(proxy).chat.completions.create(
            model="far", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        await anext(aiter(stream))
        await stream.close()
        await eventually(lambda: far.open == 0)
        assert far.aborted == 1
        assert (await proxy.entry())["outcome"] == "client_gone"


async def test_a_stream_that_breaks_off_ends_with_an_error(start_proxy: StartProxy, providers: Any) -> None:
    async with (
        running(FakeEngine(break_after_words=2)) as far,
        start_proxy(far, IMPATIENT, providers=providers(far)) as proxy,
    ):
        _, _, body = await proxy.post({**ASKED, "stream": True})
        assert b"upstream_unavailable" in body
        assert b"[DONE]" not in body


async def test_embeddings_and_completions_go_there_too(start_proxy: StartProxy, providers: Any) -> None:
    embedding = {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}], "model": "x"}
    embedding["usage"] = {"prompt_tokens": 1, "total_tokens": 1}
    text = {"id": "c", "object": "text_completion", "created": 1, "model": "x"}
    text["choices"] = [{"index": 0, "text": "42", "finish_reason": "stop"}]
    async with (
        running(FakeEngine(body=json.dumps(embedding).encode())) as far,
        start_proxy(far, POLICY, providers=providers(far)) as proxy,
    ):
        found = await client(proxy).embeddings.create(model="far", input="hello", encoding_format="float")
        assert found.data[0].embedding == [0.5]
        far.body = json.dumps(text).encode()
        answer = await client(proxy).completions.create(model="far", prompt="hello")
        assert answer.choices[0].text == "42"
        with pytest.raises(openai.BadRequestError, match="No secrets"):
            await client(proxy).embeddings.create(model="far", input="the secret")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1\nmodels:\n  far: {model: far-away}\n", r"providers.yaml:3: models.far.model"),
        ("version: 1\nmodels:\n  far: {model: a/b, api_key: sk-1}\n", r"providers.yaml:3: models.far.api_key"),
        ("version: 1\nmodels:\n  far: {model: a/b, api_key_env: NO_SUCH}\n", "the environment has no NO_SUCH"),
    ],
)
async def test_a_file_that_cannot_be_used_stops_the_start(
    start_proxy: StartProxy, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "providers.yaml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        async with start_proxy(FakeEngine(url="http://127.0.0.1:1"), POLICY, providers=tmp_path / "providers.yaml"):
            pass


async def test_no_rule_routes_to_a_model_of_another_provider(
    start_proxy: StartProxy, providers: Any, tmp_path: Path
) -> None:
    rules = POLICY + (
        "  - {name: away, when: {detector: leak, at_least: 0.5}, action: route, route: {model: far}, on_error: allow}\n"
    )
    engine = FakeEngine(url="http://127.0.0.1:1")
    path = providers(engine)
    message = "rule 'away' routes to far, which another provider serves"
    with pytest.raises(PolicyError, match=rf"policy.yaml:10: rules\.3\.route\.model: {message}"):
        async with start_proxy(engine, rules, providers=path):
            pass
    lint = ["policy", "lint", str(tmp_path / "policy.yaml")]
    assert CliRunner().invoke(app, lint).exit_code == 0
    done = CliRunner().invoke(app, [*lint, "--providers", str(path)])
    assert (done.exit_code, message in done.output) == (1, True)
    assert message in CliRunner().invoke(app, lint, env={"GUARD_PROVIDERS": str(path)}).output
    (tmp_path / "providers.yaml").write_text("version: 1\n")
    assert "providers.yaml" in CliRunner().invoke(app, [*lint, "--providers", str(path)]).output
    async with running(FakeEngine()) as vllm, start_proxy(vllm, rules.replace("model: far", "model: safe")) as proxy:
        assert (await proxy.post(BODY))[0] == 200


async def test_a_vllm_without_the_plugin_is_asked_for_nothing_it_cannot_do(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(event="missing", word_delay_s=0.2)) as engine:
        async with start_proxy(engine, PROMPT_ONLY, upstream_plugin=False) as proxy:
            async with asyncio.timeout(30):
                stream = await client(proxy).chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
                )
                # It streams: nobody waits for readouts that never come.
                await anext(aiter(stream))
                assert engine.open == 1
                await stream.close()
            status, headers, _ = await proxy.post({**BODY, "messages": [{"role": "user", "content": "secret"}]})
            assert (status, headers["x-guard-rules"]) == (400, "stop,words")
            entry = (await proxy.entries(2))[0]
        assert engine.specs == [None]
    assert entry["detectors"]["danger"] == "unavailable: vLLM runs without the plugin (upstream_plugin)"
