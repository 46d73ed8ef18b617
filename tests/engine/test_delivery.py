"""Readouts as files and through the read route, on a real server with a key: what an answer would have held."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guard.engine_process import EngineError, EngineProcess
from guard.mia.artifacts import load_artifact, without_values
from guard.mia.results import Readouts, array_from_wire
from tests.engine.server import CHAT, COMPLETIONS, KEY, MAX_BYTES, MESSAGES, RETENTION_S, Server, command, frames
from tests.servers import START_LIMIT_S

pytestmark = pytest.mark.engine

READOUTS = "/v1/mia/readouts"


def in_order(readouts: list[Any]) -> list[Readouts]:
    """From wires or not, by prompt, choice and stage."""
    parsed = [Readouts.from_wire(one) if isinstance(one, dict) else one for one in readouts]
    return sorted(parsed, key=lambda one: (one.prompt_index, one.choice_index, one.stage))


def assert_close(got: Any, expected: Any) -> None:
    """Equal wires, but for what another batch rounds differently."""
    if isinstance(expected, dict) and expected.keys() == {"dtype", "shape", "data"}:
        assert got["shape"] == expected["shape"]
        np.testing.assert_allclose(array_from_wire(got), array_from_wire(expected), rtol=1e-4, atol=1e-5)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(got[key], value)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other)
    else:
        assert got == expected


def wires(readouts: list[Readouts]) -> list[Any]:
    return [one.to_wire() for one in readouts]


@pytest.fixture(autouse=True)
def empty_folder(request: pytest.FixtureRequest) -> None:
    """Each test that uses the server begins with all the room."""
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for path in server.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def stored(server: Server) -> list[str]:
    return [path.name for path in server.folder.iterdir() if path.name != ".account"]


@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {}), (COMPLETIONS, {"prompt": ["One two", "A much longer prompt, of other words"]})],
    ids=["choices", "prompts and choices"],
)
async def test_files_and_the_route_hold_what_the_answer_holds(
    server: Server, file_format: str, stream: bool, path: str, fields: dict[str, Any]
) -> None:
    fields |= {"n": 2, "temperature": 1, "seed": 1}
    expected = in_order((await server.event(path=path, stream=stream, **fields))["readouts"])
    event = await server.event(file_format, path, stream=stream, **fields)
    artifact = event["artifact"]
    folder = server.folder / artifact["id"]
    assert artifact["files"] == {one.name: one.stat().st_size for one in folder.iterdir()}
    assert artifact["files"].keys() == {"readouts.json", f"readouts.{file_format}"}
    assert 0 < artifact["expires_at"] - time.time() <= RETENTION_S

    in_files = in_order(load_artifact(folder))
    assert {one.stage for one in in_files} == {"prompt", "final"}
    assert {item.status for one in in_files for item in one.items.values()} == {"complete"}
    assert_close(wires(in_files), wires(expected))

    status, raw = await server.request("GET", f"{READOUTS}/{artifact['id']}")
    assert status == 200
    assert wires(in_order(json.loads(raw)["readouts"])) == wires(in_files)
    for name in artifact["files"]:
        assert await server.request("GET", f"{READOUTS}/{artifact['id']}/{name}") == (200, (folder / name).read_bytes())

    assert '"data"' not in json.dumps(event)
    assert wires(in_order(event["readouts"])) == wires([without_values(one) for one in in_files])


async def test_a_stream_names_the_files_once_just_before_its_end(server: Server) -> None:
    _, plain = await server.ask(stream=True)
    _, raw = await server.ask("safetensors", stream=True)
    blocks = [block for block in raw.split(b"\n\n") if block]
    assert blocks[-1] == b"data: [DONE]"
    assert json.loads(blocks[-2].removeprefix(b"data: "))["object"] == "mia.readouts"
    ordinary = [frame for frame in frames(raw) if frame.get("object") != "mia.readouts"]
    assert len(ordinary) == len(blocks) - 2

    def text(raw: bytes) -> str:
        return "".join(c["delta"].get("content") or "" for f in frames(raw) for c in f.get("choices", ()))

    assert text(raw) == text(plain)


@pytest.mark.parametrize("key", [None, "wrong", KEY + "x"])
async def test_without_the_key_nothing_is_read_and_nothing_removed(server: Server, key: str | None) -> None:
    artifact = (await server.event("safetensors"))["artifact"]
    for method, path in (
        ("GET", artifact["id"]), ("GET", f"{artifact['id']}/readouts.json"), ("DELETE", artifact["id"]),
    ):  # fmt: skip
        assert (await server.request(method, f"{READOUTS}/{path}", key))[0] == 401
    assert stored(server) == [artifact["id"]]


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/" + "A" * 43, "/" + "A" * 43 + "/readouts.json", "/..", "/%2e%2e", "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd", "/" + "%00" * 43, "/.account", "/ID/.account", "/ID/..%2f.account",
        "/ID/%2e%2e%2f.account", "/ID%00", "/ID/readouts.pt", "/ID/readouts.json%00", "/ID/readouts.json/x", "/ID//",
        "/LINK", "/LINK/readouts.json",
    ],
)  # fmt: skip
async def test_every_other_path_is_a_404_in_openais_shape(server: Server, path: str) -> None:
    artifact_id = (await server.event("safetensors"))["artifact"]["id"]
    (server.folder / ("L" * 43)).symlink_to(server.folder / artifact_id, target_is_directory=True)
    path = path.replace("ID", artifact_id).replace("LINK", "L" * 43)
    status, raw = await server.request("GET", READOUTS + path, allow_redirects=False)
    error = json.loads(raw)["error"]
    assert (status, error["type"], error["code"]) == (404, "invalid_request_error", "readouts_not_found")
    assert (await server.request("GET", f"{READOUTS}/{artifact_id}"))[0] == 200


async def test_removed_readouts_are_gone(server: Server) -> None:
    artifact_id = (await server.event("pt"))["artifact"]["id"]
    status, raw = await server.request("DELETE", f"{READOUTS}/{artifact_id}")
    assert (status, json.loads(raw)["deleted"]) == (200, True)
    for method in ("GET", "DELETE"):
        assert (await server.request(method, f"{READOUTS}/{artifact_id}"))[0] == 404
    assert stored(server) == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_readouts_without_room_are_dropped_with_the_reason_and_the_answer_comes(
    server: Server, stream: bool
) -> None:
    kept = (await server.event("safetensors"))["artifact"]["id"]
    spec = {"hidden": {f"h{layer}": {"layer": layer, "positions": "prompt"} for layer in (1, 2, 3)}}
    messages = [{"role": "user", "content": "x" * 1500}]
    event = await server.event("safetensors", spec=spec, messages=messages, stream=stream)
    assert "artifact" not in event
    for one in in_order(event["readouts"]):
        assert {item.status for item in one.items.values()} == {"dropped"}
        assert all("max_artifact_bytes" in item.reason for item in one.items.values())
    assert stored(server) == [kept]
    assert (await server.event("safetensors"))["artifact"]


async def test_a_folder_that_breaks_later_costs_the_readouts_and_not_the_answer(server: Server) -> None:
    elsewhere = server.folder.rename(server.folder.with_name("elsewhere"))
    server.folder.write_text("not a folder")
    try:
        event = await server.event("safetensors")
    finally:
        server.folder.unlink()
        elsewhere.rename(server.folder)
    (item,) = {(item.status, item.reason) for one in in_order(event["readouts"]) for item in one.items.values()}
    assert item == ("dropped", "the server could not write the files; its log says why")
    assert "artifact" not in event


async def test_old_readouts_are_not_read_and_then_removed(server: Server) -> None:
    old, young = [(await server.event("safetensors"))["artifact"]["id"] for _ in range(2)]
    then = time.time() - RETENTION_S - 1
    os.utime(server.folder / old, (then, then))
    assert (await server.request("GET", f"{READOUTS}/{old}"))[0] == 404
    assert (await server.request("GET", f"{READOUTS}/{young}"))[0] == 200
    async with asyncio.timeout(RETENTION_S):
        while old in stored(server):
            await asyncio.sleep(0.2)


async def test_many_at_once_get_each_their_own(server: Server) -> None:
    prompts = [[{"role": "user", "content": f"Question {i} " * (i + 1)}] for i in range(16)]
    alone = [await server.event(messages=messages) for messages in prompts]
    formats = ["safetensors", "pt"] * 8
    asked = [
        server.event(file_format, messages=messages, stream=i % 4 == 0)
        for i, (file_format, messages) in enumerate(zip(formats, prompts, strict=True))
    ]
    together = await asyncio.gather(*asked)
    read = await asyncio.gather(*(server.request("GET", f"{READOUTS}/{one['artifact']['id']}") for one in together))
    for expected, event, (status, raw) in zip(alone, together, read, strict=True):
        assert status == 200
        in_files = in_order(load_artifact(server.folder / event["artifact"]["id"]))
        assert wires(in_order(json.loads(raw)["readouts"])) == wires(in_files)
        assert_close(wires(in_files), wires(in_order(expected["readouts"])))
    assert len(stored(server)) == 16


async def test_early_readouts_and_files_exclude_each_other(server: Server) -> None:
    status, raw = await server.ask("safetensors", headers={"x-mia-early": "1"})
    assert (status, json.loads(raw)["error"]["param"]) == (400, "vllm_xargs.mia.deliver")


async def test_capabilities_say_where_readouts_can_go_and_not_where_that_is(server: Server) -> None:
    status, raw = await server.request("GET", "/v1/mia/capabilities")
    known = json.loads(raw)
    assert (status, known["deliver"]) == (200, ["answer", "safetensors", "pt"])
    assert known["taps"]["max_artifact_bytes"] == MAX_BYTES
    assert str(server.folder) not in raw.decode()


async def test_a_server_without_a_folder_and_a_key_refuses_files_and_gives_no_readouts(engine_url: str) -> None:
    keyless = Server(engine_url, Path("/nowhere"))
    spec = {"hidden": {}, "deliver": "pt"}
    body = {"model": "smollm2-135m", "messages": MESSAGES, "vllm_xargs": {"mia": json.dumps(spec)}}
    status, raw = await keyless.request("POST", CHAT, None, json=body)
    assert (status, json.loads(raw)["error"]["param"]) == (400, "vllm_xargs.mia.deliver")
    assert "artifact_folder" in json.loads(raw)["error"]["message"]
    for method, path in (
        ("GET", "A" * 43),
        ("GET", "A" * 43 + "/readouts.json"),
        ("DELETE", "A" * 43),
        ("GET", "x/y/z"),
    ):
        for key in (None, "any"):
            status, raw = await keyless.request(method, f"{READOUTS}/{path}", key)
            error = json.loads(raw)["error"]
            assert (status, error["code"]) == (403, "no_api_key")
            assert "--api-key" in error["message"]


def test_a_folder_that_cannot_be_written_stops_the_start_with_the_reason(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    started = command(model_folder, tmp_path / "file" / "artifacts", "--api-key", KEY)

    async def start() -> None:
        engine = EngineProcess(started)
        try:
            await engine.wait_healthy(START_LIMIT_S)
        finally:
            await engine.stop()

    with pytest.raises(EngineError, match=r"artifact_folder .* cannot be written"):
        asyncio.run(start())


async def test_readouts_that_would_make_an_answer_too_large_are_dropped_from_it_and_come_as_files(
    server: Server,
) -> None:
    long = {"messages": [{"role": "user", "content": "why " * 400}]}
    spec = {"hidden": {f"h{i}": {"layer": 1, "positions": "prompt"} for i in range(3)} | {"last": {"layer": 1}}}
    status, raw = await server.ask(spec=spec, **long)
    assert status == 200
    (readouts,) = in_order(json.loads(raw)["mia"]["readouts"])
    # A prompt of 1600 tokens takes 800 KiB, of which two fit; what is small fits all the same.
    statuses = {name: item.status for name, item in readouts.items.items()}
    assert statuses == {"h0": "complete", "h1": "complete", "h2": "dropped", "last": "complete"}
    assert "max_answer_bytes" in readouts.items["h2"].reason
    one = {"hidden": {"h": {"layer": 1, "positions": "prompt"}}}
    event = await server.event("safetensors", spec=one, **long)
    assert event["readouts"][0]["items"]["h"]["status"] == "complete"
