"""Reranking over HTTP: ``MiaClient`` and the proxy's routes in front of a real engine, against transformers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import litellm
import pytest
from transformers import PreTrainedTokenizerFast

from guard.mia import MiaClient
from guard.proxy.app import application
from guard.proxy.keys import NewKey, create_key
from guard.proxy.services import Services
from guard.proxy_server import Stopping, listening_socket, serving
from guard.settings import Settings, SettingsError
from guard.uses.asking import served
from guard.uses.rerank import prompt, rerank
from tests.engine import oracle
from tests.engine.server import KEY, Server
from tests.proxy.detectors import register

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

HEADS = ((1, 0), (3, 2))
QUERY = "Which bird is small?"
DOCUMENTS = ["A wren weighs ten grams.", "The ostrich cannot fly.", "Ships are built of steel."]
BODY = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS}
POLICY = """\
version: 1
name: words
detectors:
  secret: {kind: words}
rules:
  - name: secret
    when: {detector: secret, at_least: 1}
    action: block
"""


def truth(server: Server, documents: Sequence[str] = DOCUMENTS) -> list[float]:
    """By document: the paper's formula on transformers' attention. Of the tiny model a token is a byte."""
    folder = server.folder.parent / "model"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    gained = []
    for query in (QUERY, "N/A"):
        content = "\n".join(part["text"] for part in prompt(query, documents)[0]["content"])
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        (reading,) = oracle.read(folder, [tokenizer.encode(text, add_special_tokens=False)])
        # As many characters as tokens.
        text = text.replace("<|start|>", "^").replace("<|end|>", "$")
        asked = slice(text.rindex(query), text.rindex(query) + len(query))
        summed = sum(reading.attention[layer - 1][head, asked].mean(axis=0) for layer, head in HEADS)
        begins = [text.index(document) for document in documents]
        gained.append([summed[at : at + len(one)] for at, one in zip(begins, documents, strict=True)])
    each = [with_query - without for with_query, without in zip(*gained, strict=True)]
    return [float(c[c > c.mean() - 2 * c.std()].sum()) / len(HEADS) for c in each]


@dataclass(frozen=True)
class Proxy:
    url: str
    ledger: Path

    async def post(self, path: str = "/v1/rerank", key: str | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, json={**BODY, **fields}, headers=headers) as answer,
        ):
            return answer.status, json.loads(await answer.read())

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]


@asynccontextmanager
async def proxied(
    server: Server, folder: Path, heads: Sequence[tuple[int, int]] = HEADS, **more: Any
) -> AsyncIterator[Proxy]:
    (folder / "configs" / "core_reranker").mkdir(parents=True, exist_ok=True)
    heads_file = {
        "model_info": {"name": "tiny"},
        "params": {"important_heads": [[layer - 1, head] for layer, head in heads]},
    }
    (folder / "configs" / "core_reranker" / "tiny.json").write_text(json.dumps(heads_file))
    (folder / "policy.yaml").write_text(POLICY)
    given = {
        "upstream": server.url,
        "upstream_api_key": KEY,
        "policy": folder / "policy.yaml",
        "config_key": "tiny",
        "model_configs": folder / "configs",
        "ledger": folder / "ledger.jsonl",
        "rerank": True,
    }
    settings = Settings(**(given | more))
    with listening_socket("127.0.0.1", 0, settings.client_timeout_s) as listener:
        services = Services(settings)
        malformed = services.metrics.count_malformed
        async with serving(application(services), listener, on_malformed=malformed, stopping=Stopping(limit_s=1)):
            yield Proxy(f"http://127.0.0.1:{listener.getsockname()[1]}", folder / "ledger.jsonl")


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


async def test_an_example_that_asks_the_proxy_says_in_one_line_to_ask_its_engine(
    server: Server, tmp_path: Path
) -> None:
    async with proxied(server, tmp_path) as proxy:
        command = [sys.executable, EXAMPLES / "hidden_states.py", "--model", "tiny", "--base-url", f"{proxy.url}/v1"]
        example = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, told = await example.communicate()
    assert (example.returncode, told.count(b"\n")) == (2, 1)
    assert b"guard's proxy; give the address of its engine, as http" in told


def test_a_client_ranks_by_what_transformers_attention_says(server: Server) -> None:
    client = MiaClient(f"{server.url}/v1", api_key=KEY)
    ranked = rerank(served(client, "tiny"), HEADS, QUERY, DOCUMENTS)
    scores = {one.index: one.score for one in ranked}
    assert [scores[i] for i in range(len(DOCUMENTS))] == pytest.approx(truth(server), abs=1e-5)


async def test_the_proxy_answers_in_the_shapes_of_jina_and_of_cohere(server: Server, tmp_path: Path) -> None:
    scores = truth(server)
    order = sorted(range(len(DOCUMENTS)), key=lambda i: -scores[i])
    async with proxied(server, tmp_path) as proxy:
        status, answer = await proxy.post()
        assert status == 200
        assert [one["index"] for one in answer["results"]] == order
        assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(
            [scores[i] for i in order], abs=1e-5
        )
        assert answer["model"] == "tiny"
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 2
        objects = [{"text": text} for text in DOCUMENTS]
        _, shown = await proxy.post("/rerank", documents=objects, top_n=2, return_documents=True)
        assert [one["document"]["text"] for one in shown["results"]] == [DOCUMENTS[i] for i in order[:2]]
        _, cohere = await proxy.post("/v2/rerank", top_n=9)
        assert len(cohere["results"]) == 3
        assert cohere["meta"]["tokens"]["input_tokens"] == answer["usage"]["prompt_tokens"]
        entry = proxy.entries()[0]
        assert (entry["route"], entry["outcome"], entry["status"]) == ("/v1/rerank", "completed", 200)
        prompt_tokens = answer["usage"]["prompt_tokens"]
        assert entry["tokens"] == {"prompt": prompt_tokens, "completion": 2, "charged": prompt_tokens + 2}
        assert "wren" not in proxy.ledger.read_text()


async def test_litellms_client_reads_the_answer(server: Server, tmp_path: Path) -> None:
    async with proxied(server, tmp_path) as proxy:
        for provider in ("cohere", "jina_ai", "hosted_vllm"):
            answer = await litellm.arerank(
                model=f"{provider}/tiny",
                query=QUERY,
                documents=DOCUMENTS,
                top_n=2,
                api_base=f"{proxy.url}/v1/rerank",
                api_key="unused",
            )
            assert answer.results is not None
            assert len(answer.results) == 2, provider


async def test_texts_are_judged_and_wrong_bodies_are_400s_that_name_the_field(server: Server, tmp_path: Path) -> None:
    async with proxied(server, tmp_path) as proxy:
        for blocked in ({"query": "a secret"}, {"documents": ["fine", {"text": "a secret"}]}):
            status, answer = await proxy.post(**blocked)
            assert (status, answer["error"]["code"]) == (400, "content_filter")
        wrong: dict[str, dict[str, Any]] = {
            "query": {"query": " "},
            "documents": {"documents": []},
            "documents[1]": {"documents": ["a", ""]},
            "documents[0]": {"documents": [{"title": "a"}]},
            "top_n": {"top_n": 0},
            "return_documents": {"return_documents": "yes"},
            "max_tokens_per_doc": {"max_tokens_per_doc": 10},
            "stream": {"stream": True},
            "vllm_xargs": {"vllm_xargs": {"mia": "{}"}},
        }
        for param, fields in wrong.items():
            status, answer = await proxy.post(**fields)
            assert (status, answer["error"]["param"]) == (400, param), answer
        for text, mistake in (("\u200b", "is blank"), ("\ud800", "half of a surrogate pair"), (7, "must be a text")):
            for param, fields in {
                "query": {"query": text},
                "documents[0]": {"documents": [text, "a"]},
                "documents[1]": {"documents": ["a", {"text": text}]},
            }.items():
                status, answer = await proxy.post(**fields)
                assert (status, answer["error"]["param"]) == (400, param), answer
                assert answer["error"]["message"].startswith(f"{param} ")
                assert mistake in answer["error"]["message"]
        # vLLM's own error, as it is.
        status, answer = await proxy.post(documents=["x" * 3000])
        assert (status, "maximum context length" in answer["error"]["message"]) == (400, True)
        assert (await proxy.post(model="another"))[0] == 404
        assert proxy.entries()[0]["action"] == "block"


async def test_keys_and_taps_are_needed(server: Server, tmp_path: Path) -> None:
    key, _ = create_key(tmp_path / "keys.yaml", NewKey())
    async with proxied(server, tmp_path, keys=tmp_path / "keys.yaml") as proxy:
        assert (await proxy.post())[0] == 401
        assert (await proxy.post(key=key))[0] == 200
    async with proxied(server, tmp_path, heads=[(2, 0)]) as proxy:
        status, answer = await proxy.post()
        assert (status, answer["error"]["code"]) == (502, "upstream_unavailable")
        assert "no attention tap" in answer["error"]["message"]
    async with proxied(server, tmp_path, rerank=False) as proxy:
        assert (await proxy.post())[0] == 404
    with pytest.raises(SettingsError, match=r"core_reranker/other\.json"):
        async with proxied(server, tmp_path, config_key="other"):
            pass
