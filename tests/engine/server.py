"""A vLLM server on a tiny model with taps of every kind, a key and a folder for artifacts, and one way to ask it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
import yarl
from safetensors.torch import save_file

from guard.engine_process import engine_command
from guard.machine import free_port
from guard.mia.engine_config import EngineConfig
from guard.models import ResolvedModel

KEY = "a key of the tests"
MAX_BYTES = 2 * 1024 * 1024
RETENTION_S = 40.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

SPEC: dict[str, Any] = {
    "spans": {"start": {"tokens": [[0, 4]]}},
    "hidden": {"last": {"layer": 2}, "all": {"layer": 1, "positions": "all"}},
    "attention": {"a": {"heads": [[1, 0], [3, 2]], "spans": ["start"], "weights": True}},
    "qk": {"q": {"heads": [[3, 2]]}},
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]


@dataclass(frozen=True)
class Server:
    url: str
    folder: Path

    async def ask(
        self, deliver: str = "answer", path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[int, bytes]:
        """One request for ``SPEC``, greedy, of six tokens unless ``fields`` say otherwise."""
        spec = fields.pop("spec", SPEC) | ({} if deliver == "answer" else {"deliver": deliver})
        what = {"messages": MESSAGES} if path == CHAT and "messages" not in fields else {}
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **what, **fields}
        return await self.request("POST", path, json=body | {"vllm_xargs": {"mia": json.dumps(spec)}}, headers=headers)

    async def event(self, deliver: str = "answer", path: str = CHAT, **fields: Any) -> dict[str, Any]:
        """What the answer says of readouts; those of a stream's frames together."""
        status, raw = await self.ask(deliver, path, **fields)
        assert status == 200, raw
        if not fields.get("stream"):
            return dict(json.loads(raw)["mia"])
        events = [frame for frame in frames(raw) if frame.get("object") == "mia.readouts"]
        return {**events[-1], "readouts": [one for event in events for one in event["readouts"]]}

    async def request(
        self, method: str, path: str, key: str | None = KEY, headers: dict[str, str] | None = None, **more: Any
    ) -> tuple[int, bytes]:
        headers = {**(headers or {}), **({"authorization": f"Bearer {key}"} if key else {})}
        url = yarl.URL(self.url + path, encoded=True)
        timeout = aiohttp.ClientTimeout(total=120)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, headers=headers, **more) as answer,
        ):
            return answer.status, await answer.read()


def frames(raw: bytes) -> list[Any]:
    return [json.loads(f.removeprefix(b"data: ")) for f in raw.split(b"\n\n") if f.startswith(b"data: {")]


def command(folder: Path, artifacts: Path, *arguments: str) -> Any:
    """How to start it on ``folder/model``, with the steering vectors of ``folder/vectors``."""
    config = EngineConfig(
        hidden_layers=(1, 2, 3),
        attention_heads=((1, 0), (3, 2)),
        steering_layers=(1, 2),
        steering_folder=folder / "vectors",
        steering_vectors=("push",),
        max_steering_vectors=2,
        max_hidden_rows_per_step=2048,
        max_answer_bytes=MAX_BYTES,
        artifact_folder=artifacts,
        max_artifact_bytes=MAX_BYTES,
        artifact_retention_s=RETENTION_S,
    )
    model = ResolvedModel(str(folder / "model"), "tiny", "tiny")
    return engine_command(
        model,
        config,
        port=free_port(),
        log_file=folder / "engine.log",
        extra_arguments=("--max-model-len", "2048", "--max-num-batched-tokens", "2048", *arguments),
    )


def save_vector(folder: Path, name: str, seed: int) -> None:
    (folder / "vectors").mkdir(exist_ok=True)
    vector = torch.randn(128, generator=torch.Generator().manual_seed(seed))
    save_file({"vector": vector}, folder / "vectors" / f"{name}.safetensors")
