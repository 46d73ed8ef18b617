"""Steering vectors that come and go over HTTP, on a real server with a key, and what steering reports there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engine.server import CHAT, KEY, MESSAGES, Server, frames, save_vector

pytestmark = pytest.mark.engine

VECTORS = "/v1/mia/vectors"


def steer(vector: str, **more: Any) -> dict[str, Any]:
    return {"steer": [{"vector": vector, "layer": 1, "coefficient": 2.0, **more}]}


def gated_on(selector: str) -> dict[str, Any]:
    """Steering of generated tokens that waits for attention on a span to be above nothing."""
    spec = {"spans": {"s": selector}, "attention": {"a": {"heads": [[3, 2]], "spans": ["s"]}}}
    return spec | steer("push", phase="decode", gate={"readout": "a", "span": "s", "above": 0.0})


async def names(server: Server) -> list[str]:
    status, raw = await server.request("GET", VECTORS)
    assert status == 200
    return [one["name"] for one in json.loads(raw)["vectors"]]


async def text(server: Server, spec: dict[str, Any]) -> str:
    status, raw = await server.ask(spec=spec)
    assert status == 200, raw
    return str(json.loads(raw)["choices"][0]["message"]["content"])


def code(raw: bytes) -> str:
    return str(json.loads(raw)["error"]["code"])


async def test_a_vector_is_loaded_used_replaced_and_evicted(server: Server, model_folder: Path) -> None:
    assert await names(server) == ["push"]
    status, raw = await server.ask(spec=steer("later"))
    assert (status, json.loads(raw)["error"]["param"]) == (400, "vllm_xargs.mia.steer.0.vector")
    save_vector(model_folder, "later", 7)
    status, raw = await server.request("PUT", f"{VECTORS}/later")
    assert (status, json.loads(raw)["name"]) == (200, "later")
    assert await names(server) == ["later", "push"]
    seventh = await text(server, steer("later"))
    assert seventh != await text(server, steer("push"))

    save_vector(model_folder, "third", 3)
    status, raw = await server.request("PUT", f"{VECTORS}/third")
    assert (status, code(raw)) == (429, "steering_bank_full")
    save_vector(model_folder, "later", 8)
    assert (await server.request("PUT", f"{VECTORS}/later"))[0] == 200
    assert await text(server, steer("later")) != seventh
    assert (await server.request("DELETE", f"{VECTORS}/later"))[0] == 200
    assert await names(server) == ["push"]
    status, raw = await server.request("DELETE", f"{VECTORS}/later")
    assert (status, code(raw)) == (404, "steering_vector_not_found")


async def test_a_vector_that_a_running_request_uses_stays_as_it_is(server: Server, model_folder: Path) -> None:
    save_vector(model_folder, "busy", 5)
    assert (await server.request("PUT", f"{VECTORS}/busy"))[0] == 200
    spec = {"mia": json.dumps(steer("busy"))}
    # Of many choices, so that it lasts for many times as long as the questions asked meanwhile.
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 64}
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(server.url + CHAT, json=body | {"vllm_xargs": spec}) as answer,
    ):
        assert answer.status == 200
        assert await answer.content.readline()
        for method in ("PUT", "DELETE"):
            status, raw = await server.request(method, f"{VECTORS}/busy")
            assert (status, code(raw)) == (409, "steering_vector_in_use")
        assert "busy" in await names(server)
        assert not answer.content.at_eof()
    # The client has left; how soon the engine knows is its own affair.
    for _ in range(50):
        status, _ = await server.request("DELETE", f"{VECTORS}/busy")
        if status != 409:
            break
        await asyncio.sleep(0.1)
    assert status == 200


async def test_files_that_are_no_vectors_and_names_that_are_none_are_refused_and_the_engine_lives(
    server: Server, model_folder: Path
) -> None:
    (model_folder / "vectors" / "evil.safetensors").write_bytes(b"\x80\x04pickle")
    for name in ("evil", "no-such"):
        status, raw = await server.request("PUT", f"{VECTORS}/{name}")
        assert (status, code(raw)) == (400, "steering_vector_unusable")
    for name in ("..%2Fmodel", "a%20b", "x" * 65, "%00"):
        for method in ("PUT", "DELETE"):
            status, raw = await server.request(method, f"{VECTORS}/{name}")
            assert status in (400, 404)
            assert json.loads(raw)["error"].keys() == {"message", "type", "param", "code"}
    for method, path in (("GET", "/push"), ("POST", ""), ("PUT", "/push/more"), ("DELETE", "/"), ("PATCH", "/push")):
        status, raw = await server.request(method, VECTORS + path)
        assert (status, code(raw)) == (404, "not_found")
    assert await names(server) == ["push"]
    assert await text(server, steer("push"))


@pytest.mark.parametrize("key", [None, "another key"])
async def test_who_has_no_key_sees_and_changes_nothing(server: Server, key: str | None) -> None:
    for method, path in (
        ("GET", VECTORS),
        ("PUT", f"{VECTORS}/push"),
        ("DELETE", f"{VECTORS}/push"),
        ("GET", f"{VECTORS}/a/b"),
    ):
        assert (await server.request(method, path, key=key))[0] == 401
    assert await names(server) == ["push"]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_reports_what_its_steering_did(server: Server, stream: bool) -> None:
    spec = {
        **steer("push", phase="decode"),
        "attention": {"a": {"heads": [[3, 2]], "spans": ["d"]}},
        "spans": {"d": "user"},
    }
    spec["steer"][0]["gate"] = {"readout": "a", "span": "d", "above": 0.0}
    status, raw = await server.ask(spec=spec, n=2, stream=stream, seed=1, temperature=1)
    assert status == 200
    events = (
        [frame for frame in frames(raw) if frame.get("object") == "mia.readouts"]
        if stream
        else [json.loads(raw)["mia"]]
    )
    final = [one for event in events for one in event["readouts"] if one["stage"] == "final"]
    assert sorted(one["choice_index"] for one in final) == [0, 1]
    for one in final:
        (report,) = one["steering"]
        assert report["opened_at"] == one["prompt_tokens"]
        assert report["steered_tokens"] == 5
        assert report["relative_dose"] > 0


async def test_a_gate_on_a_readout_that_the_prompt_cannot_have_is_a_400(server: Server) -> None:
    spec = {
        **steer("push", phase="decode"),
        "attention": {"a": {"heads": [[3, 2]], "spans": ["t"]}},
        "spans": {"t": "tool"},
    }
    spec["steer"][0]["gate"] = {"readout": "a", "span": "t", "above": 0.0}
    status, raw = await server.request(
        "POST",
        CHAT,
        json={"model": "tiny", "messages": MESSAGES, "vllm_xargs": {"mia": json.dumps(spec)}, "max_tokens": 2},
    )
    error = json.loads(raw)["error"]
    assert (status, error["param"]) == (400, "vllm_xargs.mia.steer.0.gate")
    assert "tool" in error["message"]


@pytest.mark.parametrize("key", [None, "another key"])
async def test_who_has_no_key_learns_nothing_from_specs_either(server: Server, key: str | None) -> None:
    spec = json.dumps(steer("no-such"))
    body = {"model": "tiny", "messages": MESSAGES, "vllm_xargs": {"mia": spec}}
    status, raw = await server.request("POST", CHAT, key=key, json=body)
    assert status == 401
    assert b"push" not in raw


async def test_steering_that_would_reach_no_token_is_a_400(server: Server) -> None:
    status, raw = await server.ask(spec=steer("push", phase="prefill", positions={"tokens": [[5000, 6000]]}))
    error = json.loads(raw)["error"]
    assert (status, error["param"]) == (400, "vllm_xargs.mia.steer.0.positions")
