"""A small engine that speaks the aperture's wire forms, with faults on demand, and counts what happens to requests.

Real sockets and real HTTP; only the model is missing.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from aiohttp import web

from guard.mia.results import (
    EVENT_OBJECT,
    HiddenReadout,
    ProbeReadout,
    Readout,
    Readouts,
    RowsReadout,
    Stage,
    SteeringReport,
)

WORDS = ("The", " answer", " is", " 42", ".")

Event = Literal["ok", "missing", "garbled", "not_json", "dropped", "empty"]


@dataclass
class FakeEngine:
    """``logit``: what the hidden state holds for a probe of weight 1. Delays in seconds; None never ends.

    ``scripts``: the answer's words, one script a request, the last for all others; ``finish``: how a stream says that
    it ended, None where it does not; ``frames`` and ``body`` are a stream and a whole answer as they are.
    ``final_logits``: what each request's answer held, in turn, at its one token. ``progress``: what h_node's state was
    at each word of a stream, sent behind it; None sends nothing there. ``pass_state``: the state of every second pass,
    which ``passes`` counts; None refuses them. ``window_logits``: as ``logit``, of windows that have a word in them;
    None refuses these; ``windows`` are all. Words are tokens for ``/tokenize``; ``token_rows``: how many of them one
    look inside may read at once. ``probes``: what it says that it was started with, and refuses all others of; None: it
    has no route that says so.
    """

    logit: float = -5.0
    event: Event = "ok"
    event_delay_s: float = 0.0
    event_after_frames: int = 0
    event_in_field: bool = False
    answer_delay_s: float | None = 0.0
    word_delay_s: float = 0.0
    break_after_words: int | None = None
    leave_out_done: bool = False
    finish: str | None = None
    garbled_envelope: bool = False
    error: tuple[int, dict[str, Any], dict[str, str]] | None = None
    later_error: int | None = None
    later_body: dict[str, Any] = field(default_factory=lambda: {"error": "engine died"})
    refuses_reading: bool = False
    refuses_steering: bool = False
    refuses_captures_of: str | None = None
    extra_headers: dict[str, str] = field(default_factory=lambda: {"server": "engine", "x-internal": "secret"})
    served: tuple[str, ...] = ("tiny",)
    unserved: tuple[str, ...] = ()
    scripts: list[tuple[str, ...]] = field(default_factory=lambda: [WORDS])
    frames: list[bytes] | None = None
    body: bytes | None = None
    final_logits: list[float] = field(default_factory=list)
    gates_open_at: tuple[int | None, ...] = ()
    progress: list[float | None] = field(default_factory=list)
    pass_state: float | None = None
    pass_delay_s: float = 0.0
    passes: list[dict[str, Any]] = field(default_factory=list)
    window_logits: dict[str, float | None] = field(default_factory=dict)
    window_delay_s: float | None = 0.0
    windows: list[dict[str, Any]] = field(default_factory=list)
    token_rows: int = 1 << 20
    looks: list[dict[str, Any]] = field(default_factory=list)
    look_delay_s: float | None = 0.0
    probes: tuple[str, ...] | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    open: int = 0
    aborted: int = 0

    @property
    def specs(self) -> list[dict[str, Any] | None]:
        return [json.loads(b["vllm_xargs"]["mia"]) if "mia" in b.get("vllm_xargs", {}) else None for b in self.bodies]

    def whole(self, text: str = "".join(WORDS)) -> bytes:
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 7, "total_tokens": 12, "completion_tokens": 5}
        value = {
            "id": "chatcmpl-1",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": usage,
        }
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()

    def frame(self, word: str) -> bytes:
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"

    def event_bytes(self) -> bytes:
        if self.event == "not_json":
            return b'{"object": "mia.readouts", "readouts": ['
        item: Readout = HiddenReadout("complete", 3, 4, 5, np.array([self.logit], np.float32))
        for name in self._weights(self.specs[-1]):
            item = ProbeReadout("complete", name, (4,), (5,), np.array([[self.logit]], np.float32))
        if self.event == "dropped":
            item = HiddenReadout("dropped", 3, reason="the buffer was full")
        wire = Readouts({"danger.layer3": item}, prompt_tokens=7).to_wire()
        if self.event == "garbled":
            wire["items"]["danger.layer3"] = {"kind": "hidden", "status": "complete", "values": {"dtype": "float99"}}
        return json.dumps({"object": EVENT_OBJECT, "readouts": [] if self.event == "empty" else [wire]}).encode()

    def _weights(self, spec: dict[str, Any] | None) -> set[str]:
        """Probes of detectors that a request asks for; those of gates have names of their own."""
        asked = {capture["probe"] for capture in (spec or {}).get("probes", {}).values()}
        return {name for name in asked if name.startswith("guard-")}

    def final_readouts(self) -> list[dict[str, Any]]:
        """Of the generated tokens, for a detector that is called drift; and of steering."""
        told: list[Readouts] = []
        if steers := (self.specs[-1] or {}).get("steer"):
            for i, at in enumerate(self.gates_open_at):
                reports = (SteeringReport(opened_at=at),) * len(steers)
                told.append(Readouts({}, prompt_tokens=7, choice_index=i, stage="final", steering=reports))
        if self.final_logits:
            logit = self.final_logits[min(len(self.bodies), len(self.final_logits)) - 1]
            rows = RowsReadout("complete", 3, (7,), (1,), np.array([[logit]], np.float32))
            told.append(Readouts({"drift.rows": rows}, prompt_tokens=7, stage="final"))
        return [one.to_wire() for one in told]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.headers.get("x-request-id", "").endswith("-pass"):
            return await self._second_pass(body)
        looks = request.headers.get("x-request-id", "").endswith("-inspect")
        of_window = "-pass-" in request.headers.get("x-request-id", "")
        if not looks and not of_window:
            self.bodies.append(body)
            self.paths.append(request.path)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.open += 1
        try:
            if of_window:
                return await self._window(body)
            return await (self._look_inside(body) if looks else self._answer(request, body))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.open -= 1

    async def _second_pass(self, body: dict[str, Any]) -> web.Response:
        self.passes.append(body)
        await self._sleep(self.pass_delay_s)
        if self.pass_state is None:
            error = {"message": "private words are too long", "code": 400}
            return web.json_response({"error": error}, status=400)
        item = HiddenReadout("complete", 3, 4, 5, np.array([self.pass_state], np.float32))
        event = {"object": EVENT_OBJECT, "readouts": [Readouts({"state": item}, prompt_tokens=5).to_wire()]}
        raw = self.whole("yes")[:-1] + b',"mia":' + json.dumps(event).encode() + b"}"
        return web.Response(body=raw, content_type="application/json")

    async def _window(self, body: dict[str, Any]) -> web.Response:
        self.windows.append(body)
        await self._sleep(self.window_delay_s)
        text = body["messages"][-1]["content"]
        logit = next((logit for word, logit in self.window_logits.items() if word in text), -5.0)
        if logit is None:
            return web.json_response({"error": {"message": f"too long: {text}", "code": 400}}, status=400)
        asked = json.loads(body["vllm_xargs"]["mia"])["hidden"]
        items: dict[str, Any] = {
            name: HiddenReadout("complete", 3, 4, 5, np.array([logit], np.float32)) for name in asked
        }
        event = {"object": EVENT_OBJECT, "readouts": [Readouts(items, prompt_tokens=5).to_wire()]}
        raw = self.whole("yes")[:-1] + b',"mia":' + json.dumps(event).encode() + b"}"
        return web.Response(body=raw, content_type="application/json")

    async def tokenize(self, request: web.Request) -> web.Response:
        """Every word a token, as a byte-level vocabulary spells it; the template says who speaks, and nothing more."""
        body = await request.json()
        messages = body.get("messages")
        text = (
            body.get("prompt", "") if messages is None else "\n".join(f"{m['role']} {m['content']}" for m in messages)
        )
        names = re.findall(r"\s?[^\s]+|\s", text)
        spelt = [name.replace(" ", "\u0120").replace("\n", "\u010a") for name in names]
        return web.json_response({"count": len(spelt), "tokens": [len(one) for one in spelt], "token_strs": spelt})

    async def _look_inside(self, body: dict[str, Any]) -> web.Response:
        """States that rise from token to token, from -4 towards 4, for every capture of rows."""
        self.looks.append(body)
        await self._sleep(self.look_delay_s)
        items: dict[str, Any] = {}
        for name, capture in json.loads(body["vllm_xargs"]["mia"]).get("hidden", {}).items():
            ((start, end),) = capture["positions"]["tokens"]
            at = tuple(range(start, end))
            states = 4 - 8 / (1 + np.arange(start, end, dtype=np.float32)[:, None])
            items[name] = RowsReadout("complete", 3, at, tuple(body["prompt"][start:end]), states)
            if len(at) > self.token_rows:
                items[name] = RowsReadout("dropped", 3, reason="the buffer was full")
        event = {"object": EVENT_OBJECT, "readouts": [Readouts(items, prompt_tokens=len(body["prompt"])).to_wire()]}
        raw = self.whole("x")[:-1] + b',"mia":' + json.dumps(event).encode() + b"}"
        return web.Response(body=raw, content_type="application/json")

    def grown(self, stage: Stage, first: int, values: list[float]) -> bytes:
        """States of generated tokens from ``first`` on, for a detector that is called made_up."""
        positions = tuple(range(7 + first, 7 + first + len(values)))
        states = np.array(values, np.float32)[:, None]
        rows = RowsReadout("complete", 3, positions, (1,) * len(values), states)
        wire = Readouts({"made_up.layer3": rows}, prompt_tokens=7, stage=stage).to_wire()
        return b"data: " + json.dumps({"object": EVENT_OBJECT, "readouts": [wire]}).encode() + b"\n\n"

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.error is not None:
            status, value, headers = self.error
            return web.json_response(value, status=status, headers=headers)
        spec = self.specs[-1] or {}
        unread = self.refuses_captures_of
        if unread is not None and any(name.startswith(unread) for name in spec.get("hidden", {})):
            error = {"message": "no such layer", "type": "x", "param": "y", "code": "invalid_mia_spec"}
            return web.json_response({"error": error}, status=400)
        if (self.refuses_reading and "hidden" in spec) or (self.refuses_steering and "steer" in spec):
            error = {"message": "this engine has no such tap", "type": "x", "param": "y", "code": "invalid_mia_spec"}
            return web.json_response({"error": error}, status=400)
        if self._weights(spec) - {*(self.probes or ())}:
            error = {"message": "this engine has no such probe", "type": "x", "code": "invalid_mia_spec"}
            return web.json_response({"error": error}, status=400)
        reads = bool("hidden" in spec or self._weights(spec)) and self.event != "missing"
        if body["model"] in self.unserved:
            error = {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}
            return web.json_response({"error": error}, status=404)
        script = self.scripts[min(len(self.bodies), len(self.scripts)) - 1]
        plain = "steer" not in spec or len(self.scripts) > 1
        text = "".join(script) if plain else "steered"
        if body.get("stream"):
            return await self._stream(request, reads, list(script) if plain else [text])
        if reads and request.headers.get("x-mia-early") == "1" and not self.event_in_field:
            return await self._early(request, text)
        await self._sleep(self.event_delay_s)
        await self._sleep(self.answer_delay_s)
        whole = self.body or self.whole(text)
        if reads or self.final_logits or self.gates_open_at:
            event = json.loads(self.event_bytes()) if reads else {"object": EVENT_OBJECT, "readouts": []}
            event["readouts"] += self.final_readouts()
            whole = whole[:-1] + b',"mia":' + json.dumps(event).encode() + b"}"
        return web.Response(body=whole, content_type="application/json", headers=self.extra_headers)

    async def _early(self, request: web.Request, text: str) -> web.StreamResponse:
        await self._sleep(self.event_delay_s)
        response = web.StreamResponse(headers={"x-mia-early": "1", "content-type": "application/x-ndjson"})
        await response.prepare(request)
        await response.write(self.event_bytes() + b"\n")
        await self._sleep(self.answer_delay_s)
        if self.break_after_words is not None:
            self._break(request)
        envelope = {
            "readouts": self.final_readouts(),
            "status": self.later_error or 200,
            "headers": {"content-type": "application/json", **self.extra_headers},
        }
        await response.write((b"[]" if self.garbled_envelope else json.dumps(envelope).encode()) + b"\n")
        failed = json.dumps(self.later_body, separators=(",", ":")).encode()
        await response.write(failed if self.later_error else self.body or self.whole(text))
        return response

    async def _stream(self, request: web.Request, reads: bool, words: list[str]) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream; charset=utf-8", **self.extra_headers}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        if self.frames is not None and reads:
            await response.write(b"data: " + self.event_bytes() + b"\n\n")
        for frame in self.frames or ():
            await self._sleep(self.word_delay_s)
            await response.write(frame)
        if self.frames is not None:
            return response
        for i, word in enumerate(words):
            if i == self.event_after_frames and reads:
                await self._sleep(self.event_delay_s)
                await response.write(b"data: " + self.event_bytes() + b"\n\n")
            if i == self.break_after_words:
                self._break(request)
            await self._sleep(self.word_delay_s)
            await response.write(self.frame(word))
            if i < len(self.progress) and (state := self.progress[i]) is not None:
                await response.write(self.grown("progress", i, [state]))
        await self._sleep(self.answer_delay_s)
        if states := [state for state in self.progress if state is not None]:
            await response.write(self.grown("final", 0, states))
        if finals := self.final_readouts():
            await response.write(
                b"data: " + json.dumps({"object": EVENT_OBJECT, "readouts": finals}).encode() + b"\n\n"
            )
        if self.finish is not None:
            end = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]})
            await response.write(f"data: {end}\n\n".encode())
        if not self.leave_out_done:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _sleep(self, delay_s: float | None) -> None:
        await asyncio.sleep(3600 if delay_s is None else delay_s)

    def _break(self, request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()
        raise asyncio.CancelledError

    async def models(self, request: web.Request) -> web.Response:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return web.json_response({"object": "list", "data": [{"id": one, "object": "model"} for one in self.served]})

    async def capabilities(self, request: web.Request) -> web.Response:
        if self.probes is None:
            raise web.HTTPNotFound
        taps = {"hidden_layers": [3], "probes": dict.fromkeys(self.probes, 3)}
        return web.json_response({"object": "mia.capabilities", "taps": taps})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()


@asynccontextmanager
async def running(engine: FakeEngine, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeEngine]:
    app = web.Application(client_max_size=64 * 1024 * 1024)
    for path in ("chat/completions", "completions", "responses", "messages", "embeddings"):
        app.router.add_post(f"/v1/{path}", engine.chat)
    app.router.add_post("/tokenize", engine.tokenize)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/health", engine.health)
    app.router.add_get("/v1/mia/capabilities", engine.capabilities)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
    await site.start()
    engine.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


@asynccontextmanager
async def process(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """An engine as a process of its own, for tests that kill it; ready when the block begins."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, str(port), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        assert await started.stdout.readline() == b"ready\n"
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def _serve(port: int) -> None:
    async with running(FakeEngine(word_delay_s=0.02), port):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
