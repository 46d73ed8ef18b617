"""Whom and how often litellm asks, and what of an answer's head leaves: nothing but what is configured."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from guard.settings import SettingsError
from tests.proxy.command import guard_proxy
from tests.proxy.conftest import Proxy, StartProxy
from tests.proxy.engine import FakeEngine
from tests.proxy.far import KEY, MODELS, OPENAIS
from tests.proxy.raw import Raw, raw_server
from tests.proxy.test_answer_status import HEADS, ODD
from tests.proxy.test_provider_answers import POLICY, asked

pytest.importorskip("litellm", reason="needs litellm: pip install 'mia-guard[litellm]'")
one_process = pytest.mark.usefixtures("one_process")

EMBEDDINGS = "/v1/embeddings"
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
ANSWER = json.dumps({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE]}).encode()
USAGE = {"prompt_tokens": 1, "total_tokens": 1}
ELSEWHERE = {"hf": "huggingface/a/b", "replicate": "replicate/a/b"}
"""litellm asks these, for some APIs, at an address of its own, whatever ``api_base`` says."""


def providers_file(folder: Path, models: dict[str, dict[str, Any]]) -> Path:
    path = folder / "providers.yaml"
    path.write_text(json.dumps({"version": 1, "models": models}))
    return path


def models_at(url: str, names: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"model": model, "api_base": url + ("/v1" if name in OPENAIS else ""), "api_key_env": "FAR_KEY"}
        for name, model in names.items()
    }


@pytest.fixture
def start(start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FAR_KEY", KEY)

    @asynccontextmanager
    async def start(names: dict[str, str] = MODELS) -> AsyncIterator[tuple[Proxy, Raw]]:
        async with raw_server() as server:
            path = providers_file(tmp_path, models_at(server.url, names))
            async with start_proxy(FakeEngine(), POLICY, upstream="", providers=path) as proxy:
                yield proxy, server

    return start


@one_process
@pytest.mark.parametrize("provider", MODELS)
async def test_every_status_and_version_of_a_providers_ends_in_an_answer(start: Any, provider: str) -> None:
    async with start() as (proxy, server):
        for fields in ({}, {"stream": True}):
            for line in (*HEADS, *(f"HTTP/1.1 {status} X" for status in ODD if not 200 < status < 300)):
                server.says(line, b'{"error": {"message": "no"}}')
                status, _, body = await asked(proxy, provider, **fields)
                assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unavailable"), line


@one_process
@pytest.mark.parametrize("provider", MODELS)
async def test_no_header_of_a_providers_carries_our_key_or_anything_else(start: Any, provider: str) -> None:
    async with start() as (proxy, server):
        for fields in ({}, {"stream": True}):
            for name in ("retry-after", "retry-after-ms", "x-request-id", "set-cookie", "x-ratelimit", "location"):
                for status in (429, 500):
                    server.says(status, b'{"error": {"message": "no"}}', head=f"{name}: {KEY}\r\n")
                    got, headers, body = await asked(proxy, provider, **fields)
                    assert (got, json.loads(body)["error"]["message"]) == (status, "no")
                    assert KEY not in str(headers)
                    assert "retry-after" not in headers
            server.says(429, b"{}", head="Retry-After: 7\r\nretry-after-ms: 6500\r\n")
            _, headers, _ = await asked(proxy, provider, **fields)
            assert (headers["retry-after"], headers["retry-after-ms"]) == ("7", "6500")


@one_process
async def test_our_key_leaves_in_no_name_of_a_field(start: Any) -> None:
    async with start() as (proxy, server):
        server.says(200, ANSWER.replace(b'"role"', json.dumps(KEY).encode() + b': 1, "role"'))
        status, _, body = await asked(proxy, "openai")
        assert (status, KEY in body) == (200, False)


@one_process
@pytest.mark.parametrize("provider", MODELS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", EMBEDDINGS])
async def test_nothing_is_sent_twice(start: Any, provider: str, path: str) -> None:
    bodies: dict[str, Any] = {"/v1/completions": {"prompt": "a"}, EMBEDDINGS: {"input": "a"}}
    body = {"model": provider, **bodies.get(path, {"messages": [{"role": "user", "content": "a"}]})}
    async with start() as (proxy, server):
        for status in (408, 409, 429, 500, 503):
            server.heads.clear()
            server.says(status, b'{"error": {"message": "busy"}}', head="retry-after: 3\r\n")
            got, headers, raw = await proxy.post(body, path=path)
            if got == 400:
                # It has no such API.
                assert server.heads == []
                return
            assert (got, headers["retry-after"], len(server.heads)) == (status, "3", 1)
        server.heads.clear()
        server.gone = 9
        got, _, raw = await proxy.post(body, path=path)
        assert (got, json.loads(raw)["error"]["code"], len(server.heads)) == (502, "upstream_unavailable", 1)


@one_process
@pytest.mark.parametrize("provider", MODELS)
async def test_no_cookie_of_a_providers_is_kept(start: Any, provider: str) -> None:
    async with start() as (proxy, server):
        for status in (200, 400):
            server.says(status, ANSWER, head="set-cookie: session=one; Path=/\r\n")
            for _ in range(2):
                await asked(proxy, provider)
        assert len(server.heads) == 4
        assert "cookie" not in "".join(server.heads).lower()


@one_process
async def test_an_api_that_litellm_would_ask_elsewhere_is_refused_and_nothing_is_asked(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(ELSEWHERE) as (proxy, server):
        status, _, body = await proxy.post({"model": "hf", "input": "a"}, path=EMBEDDINGS)
        assert (status, json.loads(body)["error"]["param"]) == (400, "model")
        assert "not configured" in json.loads(body)["error"]["message"]
        assert server.heads == []
        # Others of its APIs go where they should.
        server.says(429, b'{"error": "busy"}')
        assert (await asked(proxy, "hf"))[0] == 429


@one_process
async def test_vectors_that_are_none_are_no_answer(start: Any) -> None:
    good = {"object": "embedding", "index": 0, "embedding": [0.5]}
    odd: list[Any] = [[], [{**good, "embedding": None}], [{**good, "embedding": []}], [good, {"index": 1}], [None]]
    async with start() as (proxy, server):
        for data in odd:
            server.says(200, json.dumps({"object": "list", "data": data, "model": "m", "usage": USAGE}).encode())
            status, _, body = await proxy.post({"model": "openai", "input": "a"}, path=EMBEDDINGS)
            assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unavailable"), data


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"model": "nosuchprovider/x"}, "litellm knows no such provider"),
    "without a key": ({"model": "openai/gpt-4o-mini"}, "credentials"),
    "without a key, elsewhere": ({"model": "gemini/x", "api_base": "http://127.0.0.1:1"}, "GEMINI_API_KEY"),
    "astray": ({"model": "replicate/a/b", "api_base": "http://127.0.0.1:1", "api_key_env": "FAR_KEY"}, "may_ask"),
}


@one_process
async def test_a_model_that_cannot_be_asked_is_known_before_anybody_asks(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAR_KEY", KEY)
    good = {"model": "hosted_vllm/x", "api_base": "http://127.0.0.1:1/v1"}
    path = providers_file(tmp_path, {**{name: model for name, (model, _) in WRONG.items()}, "good": good})
    async with start_proxy(FakeEngine(), POLICY, upstream="", providers=path) as proxy:
        for name, (_, why) in WRONG.items():
            status, _, body = await asked(proxy, name)
            error = json.loads(body)["error"]
            assert (status, error["message"]) == (502, "the provider of this model cannot be asked"), name
            assert f"model {name} cannot be asked" in caplog.text
            assert why in caplog.text
        assert "cannot be reached" in (await asked(proxy, "good"))[2]
        assert (await proxy.get("/readyz"))[0] == 503
    assert KEY not in caplog.text


async def test_an_api_that_litellm_has_no_key_for_is_not_the_clients_fault(
    start_proxy: StartProxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with raw_server() as server:
        server.says(200, ANSWER)
        path = providers_file(tmp_path, {"far": {"model": "mistral/x", "api_base": server.url}})
        async with start_proxy(FakeEngine(), POLICY, upstream="", providers=path) as proxy:
            assert (await asked(proxy, "far"))[0] == 200
            status, _, body = await proxy.post({"model": "far", "input": "a"}, path=EMBEDDINGS)
    assert (status, json.loads(body)["error"]["message"]) == (502, "the provider of this model cannot be asked")
    assert "mistral/x: litellm has no key for /v1/embeddings" in capfd.readouterr().err


@pytest.mark.parametrize("workers", [(), ("--set", "workers=2")], ids=["one", "several"])
async def test_a_model_that_cannot_be_asked_stops_the_start(tmp_path: Path, workers: tuple[str, ...]) -> None:
    path = providers_file(tmp_path, {"far": {"model": "nosuchprovider/x"}})
    options = ("--set", f"providers={path}", "--upstream", "", *workers)
    with pytest.raises(
        AssertionError, match=r"it ended: [^$]*models\.far: nosuchprovider/x cannot be asked: litellm knows"
    ):
        async with guard_proxy(tmp_path, FakeEngine(), *options):
            pass


async def test_a_process_that_cannot_start_stops_the_start(tmp_path: Path) -> None:
    path = providers_file(tmp_path, {"far": {"model": "hosted_vllm/x", "api_base": "http://127.0.0.1:1"}})
    long = tmp_path / ("x" * 90)
    long.mkdir()
    options = ("--set", f"providers={path}", "--upstream", "")
    with pytest.raises(AssertionError, match=r"set TMPDIR to a shorter folder[^$]*does not start"):
        async with guard_proxy(tmp_path, FakeEngine(), *options, TMPDIR=str(long)):
            pass


@pytest.mark.parametrize("key", ["sk-\u00e9\u00e9\u00e9\u00e9\u00e9", "sk-one\nsk-two"])
async def test_a_key_that_is_none_stops_the_start(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("FAR_KEY", key)
    path = providers_file(tmp_path, {"far": {"model": "openai/x", "api_key_env": "FAR_KEY"}})
    with pytest.raises(SettingsError, match="FAR_KEY has characters that no key has"):
        async with start_proxy(FakeEngine(), POLICY, upstream="", providers=path):
            pass
