"""Pictures, sounds and files for other providers' models reach them or are refused, with the real litellm between."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from guard.proxy.provider_media import AS_THEY_ARE, ONLY
from tests.proxy.conftest import StartProxy
from tests.proxy.engine import FakeEngine, running

pytest.importorskip("litellm", reason="needs litellm: pip install 'mia-guard[litellm]'")

pytestmark = pytest.mark.usefixtures("one_process")

POLICY = "version: 1\nname: none\nrules: [{name: all, when: {detector: d, at_least: 0.9}, action: flag}]\n"
POLICY += "detectors: {d: {kind: probe}}\n"
MODELS = {
    "anthropic": "anthropic/claude-sonnet-4-5",
    "gemini": "gemini/gemini-2.0-flash",
    "mistral": "mistral/mistral-large-latest",
    "ollama_chat": "ollama_chat/llama3",
    "ollama": "ollama/llama3",
    "azure_ai": "azure_ai/x",
    "deepseek": "deepseek/deepseek-chat",
    "openai": "openai/gpt-4o",
    "hosted_vllm": "hosted_vllm/x",
}
KINDS = {"png": "image/png", "wav": "audio/wav", "pdf": "application/pdf", "mp4": "video/mp4"}
HEADS = {"png": b"\x89PNG\r\n\x1a\n", "wav": b"RIFF\x00\x00WAVE", "pdf": b"%PDF-1.4\n", "mp4": b"\x00\x00\x00\x18ftyp"}


def encoded(kind: str, mark: str) -> str:
    return base64.b64encode(HEADS[kind].ljust(12) + mark.encode()).decode()


def parts(url: str, mark: str) -> dict[str, dict[str, Any]]:
    """Each with ``mark`` in it, in some spelling."""

    def data(kind: str) -> str:
        return f"data:{KINDS[kind]};base64,{encoded(kind, mark)}"

    return {
        "picture": {"type": "image_url", "image_url": {"url": data("png")}},
        "bare picture": {"type": "image_url", "image_url": data("png")},
        "picture elsewhere": {"type": "image_url", "image_url": {"url": f"{url}/{mark}.png"}},
        "sound": {"type": "input_audio", "input_audio": {"data": encoded("wav", mark), "format": "wav"}},
        "sound elsewhere": {"type": "audio_url", "audio_url": {"url": f"{url}/{mark}.wav"}},
        "video": {"type": "video_url", "video_url": {"url": data("mp4")}},
        "video elsewhere": {"type": "video_url", "video_url": {"url": f"{url}/{mark}.mp4"}},
        "file": {"type": "file", "file": {"file_data": data("pdf"), "filename": "a.pdf"}},
        "file by an address": {"type": "file", "file": {"file_id": f"{url}/{mark}.pdf", "format": "application/pdf"}},
        "file at an address": {"type": "file", "file": {"file_data": f"{url}/{mark}.pdf", "filename": "a.pdf"}},
        "document": {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": mark}},
        "another's picture": {"type": "image", "source": {"type": "base64", "data": encoded("png", mark)}},
    }


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, list[str], list[str]]]:
    """Where it listens, all bodies that came, and all paths that were only looked at."""
    bodies: list[str] = []
    fetched: list[str] = []

    async def any_(request: web.Request) -> web.Response:
        (bodies if request.method == "POST" else fetched).append(await request.text() or request.path)
        return web.json_response({"error": {"message": "no"}}, status=400)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", any_)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies, fetched
    finally:
        await runner.cleanup()


def models_at(url: str, folder: Path) -> Path:
    """The file that lists ``MODELS`` there."""
    models = {
        name: {"model": model, "api_base": url + ("/v1" if name == "mistral" else ""), "api_key_env": "FAR_KEY"}
        for name, model in MODELS.items()
    }
    path = folder / "providers.yaml"
    path.write_text(json.dumps({"version": 1, "models": models}))
    return path


def test_every_provider_of_the_table_is_measured() -> None:
    assert MODELS.keys() - AS_THEY_ARE == ONLY.keys()


async def test_what_a_provider_would_not_get_is_refused_and_nothing_is_fetched(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAR_KEY", "k")
    async with (
        running(FakeEngine()) as near,
        listening() as (url, bodies, fetched),
        start_proxy(near, POLICY, providers=models_at(url, tmp_path)) as proxy,
    ):

        async def told(provider: str, number: int, kind: str) -> tuple[str, int, str, str]:
            # As many bytes as base64 takes at once, so that it is spelt alike everywhere.
            mark = f"MARK{number:08}"
            part = parts(url, mark)[kind]
            message = {"role": "user", "content": [{"type": "text", "text": "hi"}, part]}
            status, _, raw = await proxy.post({"model": provider, "messages": [message]})
            return f"{provider}: {kind}", status, raw.decode(), mark

        asked = [(provider, kind) for provider in MODELS for kind in parts(url, "")]
        answers = await asyncio.gather(*(told(one, i, kind) for i, (one, kind) in enumerate(asked)))
    sent = "\n".join(bodies)
    silent = [
        (what, status, raw)
        for what, status, raw, mark in answers
        if mark not in sent
        and base64.b64encode(mark.encode()).decode() not in sent
        and not (status == 400 and ("does not reach models of" in raw or "is an address" in raw))
        # litellm itself knows no such part.
        and not (status == 400 and "has no form that the provider" in raw)
    ]
    assert silent == []
    assert fetched == []
    refused = {what for what, _, raw, _ in answers if "does not reach models of" in raw}
    assert not {what for what in refused if what.startswith(("openai", "hosted_vllm"))}
    assert all(" address" not in what or "is an address" in raw for what, _, raw, _ in answers)
    assert not {f"{name}: picture" for name in MODELS if name != "deepseek"} & refused
    assert {"gemini: sound", "anthropic: file", "mistral: file", "anthropic: document"}.isdisjoint(refused)
