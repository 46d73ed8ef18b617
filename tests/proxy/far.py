"""A provider that answers as it is told, in the wire form of whoever it stands for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

KEY = "sk-supersecretkey1234567890"
ELSEWHERE = "/elsewhere"

MODELS = {
    "openai": "openai/gpt-4o-mini",
    "hosted_vllm": "hosted_vllm/llama-3",
    "mistral": "mistral/mistral-large-latest",
    "deepseek": "deepseek/deepseek-chat",
    "azure_ai": "azure_ai/x",
    "anthropic": "anthropic/claude-sonnet-4-5",
    "gemini": "gemini/gemini-2.0-flash",
    "ollama_chat": "ollama_chat/llama3",
}
MORE = {
    "azure": "azure/gpt4",
    "groq": "groq/llama-3",
    "huggingface": "huggingface/meta/llama",
    "openrouter": "openrouter/x/y",
    "xai": "xai/grok",
    "litellm_proxy": "litellm_proxy/x",
    "together_ai": "together_ai/x",
    "fireworks_ai": "fireworks_ai/x",
    "ollama": "ollama/llama3",
}
"""Listed as well; they differ from these in little."""

OPENAIS = ("openai", "hosted_vllm", "mistral", "deepseek", "azure_ai")
"""Those who speak as OpenAI does, below ``/v1``."""


@dataclass
class Far:
    """``frames``: a stream; otherwise a whole answer. ``hangs``: it says nothing."""

    url: str = ""
    frames: list[bytes] = field(default_factory=list)
    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    paths: list[str] = field(default_factory=list)
    open: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path if request.method != "CONNECT" else request.path_qs)
        await request.read()
        self.open += 1
        try:
            if self.hangs:
                await asyncio.sleep(3600)
            if not self.frames:
                body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
                headers = {"content-type": "application/json", **self.headers}
                return web.Response(status=self.status, body=body, headers=headers)
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for frame in self.frames:
                await response.write(frame)
            return response
        finally:
            self.open -= 1


@asynccontextmanager
async def far_away(folder: Path) -> AsyncIterator[tuple[Far, Path]]:
    """It, and the file that lists all these models there, and one that nobody serves: ``down``."""
    far = Far()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", far.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    far.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    models = {
        name: {"model": model, "api_base": far.url + ("/v1" if _has_v1(name) else ""), "api_key_env": "FAR_KEY"}
        for name, model in {**MODELS, **MORE}.items()
    }
    for name in ("openai", "anthropic", "gemini"):
        models[f"{name}-down"] = {**models[name], "api_base": "http://127.0.0.1:1"}
    path = folder / "providers.yaml"
    path.write_text(json.dumps({"version": 1, "models": models}))
    try:
        yield far, path
    finally:
        await runner.cleanup()


def _has_v1(name: str) -> bool:
    return name in OPENAIS or (name in MORE and name not in ("azure", "ollama"))


ENDS = {"anthropic": "end_turn", "gemini": "STOP"}
"""Their words for an ending that is OpenAI's ``stop``, where it is another one."""


def stream(
    provider: str,
    *texts: str,
    ends: bool = True,
    error: str | None = None,
    finish: str | None = None,
    usage: tuple[int, int] | None = None,
) -> list[bytes]:
    """An answer of one choice; with ``error`` at its end, if it has one. ``finish``: the provider's word for how it
    ended, in an event of its own; none where it is empty. ``usage``: tokens of prompt and answer, where they are told.
    """
    if provider in FORMS:
        frames = FORMS[provider](texts, ends, error, finish)
        return frames if usage is None else COUNTED[provider](frames, *usage)
    frames = [chunk(0, {"content": text}) for text in texts]
    if ends:
        frames.append(chunk(0, {}, "stop" if finish is None else finish or None))
    if error is not None:
        frames.append(event({"error": {"message": error, "type": "overloaded_error", "code": "busy"}}))
    if usage is not None:
        told = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
        frames.append(event({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": told}))
    return frames + ([] if not ends and error is None else [b"data: [DONE]\n\n"])


def whole(provider: str, text: str, finish: str | None) -> dict[str, Any]:
    """The same as a whole answer."""
    said = {"role": "assistant", "content": text}
    if provider == "anthropic":
        content = [{"type": "text", "text": text}]
        told = {"id": "m", "type": "message", "role": "assistant", "model": "x", "content": content}
        return {**told, "stop_reason": finish, "usage": {"input_tokens": 0, "output_tokens": 0}}
    if provider == "gemini":
        content_ = {"parts": [{"text": text}], "role": "model"}
        return {"candidates": [{"content": content_, "index": 0, **({"finishReason": finish} if finish else {})}]}
    if provider == "ollama_chat":
        told = {"model": "x", "created_at": "2024-01-01T00:00:00Z", "message": said}
        return {**told, "done": bool(finish), **({"done_reason": finish} if finish else {})}
    choice = {"index": 0, "message": said, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def event(value: dict[str, Any]) -> bytes:
    named = f"event: {value['type']}\n" if "type" in value else ""
    return f"{named}data: {json.dumps(value)}\n\n".encode()


def _anthropic(texts: tuple[str, ...], ends: bool, error: str | None, finish: str | None) -> list[bytes]:
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "x", "stop_reason": None}
    block = {"type": "text", "text": ""}
    frames = [
        event({"type": "message_start", "message": {**message, "usage": {"input_tokens": 0, "output_tokens": 0}}}),
        event({"type": "content_block_start", "index": 0, "content_block": block}),
    ]
    for text in texts:
        delta = {"type": "text_delta", "text": text}
        frames.append(event({"type": "content_block_delta", "index": 0, "delta": delta}))
    if ends:
        reason = "end_turn" if finish is None else finish or None
        frames.append(event({"type": "content_block_stop", "index": 0}))
        frames.append(event({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {}}))
        frames.append(event({"type": "message_stop"}))
    if error is not None:
        frames.append(event({"type": "error", "error": {"type": "overloaded_error", "message": error}}))
    return frames


def _gemini(texts: tuple[str, ...], ends: bool, error: str | None, finish: str | None) -> list[bytes]:
    candidates: list[dict[str, Any]] = [
        {"index": 0, "content": {"parts": [{"text": text}], "role": "model"}} for text in texts
    ]
    if ends and finish:
        candidates.append({"index": 0, "finishReason": finish})
    elif ends and finish is None:
        candidates[-1]["finishReason"] = "STOP"
    frames = [event({"candidates": [one]}) for one in candidates]
    if error is not None:
        frames.append(event({"error": {"code": 503, "message": error, "status": "overloaded_error"}}))
    return frames


def _ollama(texts: tuple[str, ...], ends: bool, error: str | None, finish: str | None) -> list[bytes]:
    head = {"model": "x", "created_at": "2024-01-01T00:00:00Z", "done": False}
    lines: list[dict[str, Any]] = [{**head, "message": {"role": "assistant", "content": text}} for text in texts]
    if ends and finish != "":
        last = {"role": "assistant", "content": ""}
        lines.append({**head, "message": last, "done": True, "done_reason": finish or "stop"})
    if error is not None:
        lines.append({"error": error})
    return [json.dumps(line).encode() + b"\n" for line in lines]


FORMS: Mapping[str, Callable[[tuple[str, ...], bool, str | None, str | None], list[bytes]]] = {
    "anthropic": _anthropic,
    "gemini": _gemini,
    "ollama_chat": _ollama,
}
"""Streams of those who do not speak as OpenAI does."""


def _anthropic_counted(frames: list[bytes], prompt: int, answer: int) -> list[bytes]:
    """The prompt's at the beginning, the answer's at the end."""
    first = frames[0].replace(
        b'"input_tokens": 0, "output_tokens": 0', b'"input_tokens": %d, "output_tokens": 1' % prompt
    )
    return [first, *(one.replace(b'"usage": {}', b'"usage": {"output_tokens": %d}' % answer) for one in frames[1:])]


def _gemini_counted(frames: list[bytes], prompt: int, answer: int) -> list[bytes]:
    told = {"promptTokenCount": prompt, "candidatesTokenCount": answer, "totalTokenCount": prompt + answer}
    return [*frames[:-1], frames[-1].replace(b"}]}\n", b'}], "usageMetadata": %s}\n' % json.dumps(told).encode())]


def _ollama_counted(frames: list[bytes], prompt: int, answer: int) -> list[bytes]:
    counts = b'"done": true, "prompt_eval_count": %d, "eval_count": %d' % (prompt, answer)
    return [one.replace(b'"done": true', counts) for one in frames]


COUNTED: Mapping[str, Callable[[list[bytes], int, int], list[bytes]]] = {
    "anthropic": _anthropic_counted,
    "gemini": _gemini_counted,
    "ollama_chat": _ollama_counted,
}
"""The same with a usage where they tell it."""
