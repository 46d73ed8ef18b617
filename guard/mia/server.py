"""What is added to vLLM's API server: specs are checked before the engine, readouts leave with the answer.

One plain ASGI middleware (``--middleware guard.mia.server.MiaMiddleware``). A request without ``vllm_xargs.mia``, or
MIA's own keys there, passes untouched. Never reads or changes the answer itself: readouts are put beside it, or into
files that are named there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from guard.mia.access import may_ask
from guard.mia.artifact_store import ArtifactFolderError, ArtifactStore, NoSpaceError, artifact_store
from guard.mia.artifacts import FileFormat, dropped, without_values
from guard.mia.compat import CompatConfig, compat_of
from guard.mia.compat_request import asks, requested_spec, without_keys
from guard.mia.engine_config import EngineConfig, configured
from guard.mia.frontend import EngineFacts, RequestContext, active
from guard.mia.metrics import engine_metrics
from guard.mia.results import EVENT_OBJECT, Readout, Readouts, not_complete, size_bytes
from guard.mia.spec import MiaSpec, SpecError
from guard.mia.vector_routes import vectors_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
WriteFiles = Callable[[list[Readouts]], Awaitable[dict[str, Any]]]

log = logging.getLogger("guard.mia")

EARLY_HEADER = b"x-mia-early"
"""Asks, with value 1, that prompt readouts of an answer that is not streamed come as soon as they exist."""

END_FRAME = b"data: [DONE]"
"""Clients read an event stream no further."""

TOO_LARGE = "no space in an answer (max_answer_bytes); ask for files with deliver"

WRITERS = 4
"""Threads that write artifacts; of their own, so that a slow disk delays nobody who wants no files."""


class MiaMiddleware:
    """Holds the app and its engine's taps: what belongs to one request lives in ``RequestContext`` and ``_Answer``."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self._taps: EngineConfig | None = None
        self._engine = EngineFacts()
        self._compat: CompatConfig | None = None
        self._writers = ThreadPoolExecutor(WRITERS, "mia-artifacts")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(scope, receive, send)
        if scope["type"] != "http" or scope["method"] != "POST" or not may_ask(scope):
            return await self.app(scope, receive, send)
        body = await _read_body(receive)
        if body is None:
            return None
        request = _asking(body)
        if request is None:
            return await self.app(scope, _replay(body, receive), send)
        try:
            if self._taps is None:
                self._taps = _config(scope["app"])
                self._compat = compat_of(scope["app"].state.vllm_config.additional_config)
                self._engine = EngineFacts.of(scope["app"].state.vllm_config)
            vectors = vectors_of(scope["app"])
            digests = await vectors.digests() if self._taps.steering_layers else {}
            spec = requested_spec(request["vllm_xargs"], self._compat, self._taps, digests)
            self._taps.check(spec, digests)
            early = not request.get("stream") and (EARLY_HEADER, b"1") in scope["headers"]
            _check_compatible(request, spec, early)
        except SpecError as error:
            engine_metrics().refused_specs.inc()
            return await _send_error(send, error)
        progress = request.get("stream") is True and spec.deliver == "answer" and spec.progress_tokens is not None
        context = RequestContext(
            spec,
            digests,
            self._engine,
            self._taps.max_host_bytes,
            self._taps.max_answer_bytes,
            progress,
        )
        # The engine gets the very object that was checked, however the text spelt it.
        if "mia" not in request["vllm_xargs"]:
            request["vllm_xargs"] = {**without_keys(request["vllm_xargs"]), "mia": spec.to_wire()}
        body = json.dumps(request).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        answer = _Answer(context, send, self._write_files(spec.deliver) if spec.deliver != "answer" else None)
        with active(context), vectors.using(spec):
            if early:
                await answer.run_early(self.app(scope, _replay(body, receive), answer.send))
            else:
                await self.app(scope, _replay(body, receive), answer.send)

    async def _live(self, scope: Message, receive: Receive, send: Send) -> None:
        """The application's life. A folder for artifacts that cannot be used ends it before it begins."""
        taps = configured(scope["app"].state.vllm_config.additional_config)
        metrics = engine_metrics()
        metrics.bank_vectors.set(0 if taps is None else len(taps.steering_vectors))
        metrics.bank_capacity.set(0 if taps is None else taps.bank_capacity)
        store = artifact_store(taps)
        if store is None:
            return await self.app(scope, receive, send)
        try:
            await asyncio.to_thread(store.prepare)
        except ArtifactFolderError as error:
            await receive()
            return await send({"type": "lifespan.startup.failed", "message": f"mia: {error}"})
        cleaning = asyncio.create_task(_clean_regularly(store))
        try:
            await self.app(scope, receive, send)
        finally:
            cleaning.cancel()

    def _write_files(self, file_format: FileFormat) -> WriteFiles:
        store = artifact_store(self._taps)
        assert store is not None, "checked with the spec"

        async def write(readouts: list[Readouts]) -> dict[str, Any]:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._writers, _write, store, readouts, file_format)

        return write


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body, or None when the client left before sending it."""
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give ``body`` once, then whatever the client does next."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _asking(body: bytes) -> dict[str, Any] | None:
    """The parsed request when it asks for something; bodies that are not JSON are left to vLLM to refuse."""
    if b"vllm_xargs" not in body:
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or not isinstance(request.get("vllm_xargs"), dict):
        return None
    return request if asks(request["vllm_xargs"]) else None


def _config(app: Any) -> EngineConfig:
    config: EngineConfig | None = configured(app.state.vllm_config.additional_config)
    if config is None:
        raise SpecError("this engine was started without taps (--additional-config '{\"mia\": {...}}')")
    return config


def _check_compatible(request: dict[str, Any], spec: MiaSpec, early: bool) -> None:
    if early and spec.deliver != "answer":
        raise SpecError("x-mia-early wants readouts before the answer's end, when no file is written", "mia.deliver")
    if request.get("use_beam_search"):
        raise SpecError("does not work with use_beam_search, which rewrites the request step by step")


async def _send_error(send: Send, error: SpecError) -> None:
    body = json.dumps(
        {
            "error": {
                "message": str(error),
                "type": "invalid_request_error",
                "param": f"vllm_xargs.{error.param}",
                "code": "invalid_mia_spec",
            }
        }
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _event(readouts: list[Readouts]) -> dict[str, Any]:
    return {"object": EVENT_OBJECT, "readouts": [one.to_wire() for one in readouts]}


async def _clean_regularly(store: ArtifactStore) -> None:
    while True:
        await asyncio.sleep(store.cleaning_interval_s)
        try:
            await asyncio.to_thread(store.clean)
        except OSError:
            log.exception("the artifact folder could not be cleaned")


def _write(store: ArtifactStore, readouts: list[Readouts], file_format: FileFormat) -> dict[str, Any]:
    """The event of an answer whose readouts are files. A disk that fails costs the readouts, not the answer."""
    try:
        artifact = store.write(readouts, file_format)
    except NoSpaceError as error:
        complete = sum(item.status == "complete" for one in readouts for item in one.items.values())
        engine_metrics().count_dropped(str(error), complete)
        return _event([dropped(one, str(error)) for one in readouts])
    except OSError:
        log.exception("an artifact could not be written")
        return _event([dropped(one, "the server could not write the files; its log says why") for one in readouts])
    return {**_event([without_values(one) for one in readouts]), "artifact": artifact.to_wire()}


class _Answer:
    """Puts readouts beside one answer: a first frame of a stream, a field of a JSON body, or a first line.

    Three wire forms: an event stream gets a frame of its own before the first frame that follows the readouts; a JSON
    body gets a field ``mia``; with ``x-mia-early`` the response is one line with the readouts at once, one line with
    the status and headers of vLLM's answer, then that answer's body as it is. Where ``write_files`` is given, the
    frame or field comes once, at the answer's end, and says where they are.
    """

    def __init__(self, context: RequestContext, send: Send, write_files: WriteFiles | None) -> None:
        self._context = context
        self._send = send
        self._write_files = write_files
        self._room_bytes = context.max_answer_bytes
        self._start: Message | None = None
        self._streams = False
        self._body: list[bytes] = []
        self._early = False
        self._sending = asyncio.Lock()

    async def run_early(self, app: Awaitable[None]) -> None:
        first = asyncio.create_task(self._send_first_line())
        try:
            await app
        finally:
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first

    async def _send_first_line(self) -> None:
        await self._context.arrived.wait()
        if self._start is not None:
            return
        self._early = True
        async with self._sending:
            headers = [(b"content-type", b"application/x-ndjson"), (EARLY_HEADER, b"1")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send_part(_line(_event(self._take_fitting())))

    async def send(self, message: Message) -> None:
        if self._streams and not self._context.pending:
            # As nearly every frame of nearly every answer: nothing of ours is on its way.
            return await self._send(message)
        async with self._sending:
            if message["type"] == "http.response.start":
                await self._on_start(message)
            elif self._early:
                await self._send(message)
            elif self._streams:
                if self._context.pending and (self._write_files is None or _ends(message)):
                    await self._send_part(b"data: " + _line(await self._take_event()) + b"\n")
                await self._send(message)
            else:
                await self._on_json(message)

    async def _on_start(self, message: Message) -> None:
        self._start = message
        if self._early:
            headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            later = [one.to_wire() for one in self._take_fitting()]
            await self._send_part(_line({"status": message["status"], "headers": headers, "readouts": later}))
        elif _is_event_stream(message):
            self._streams = True
            await self._send(message)

    async def _on_json(self, message: Message) -> None:
        """Hold the answer until it is whole, then add the field. The client sees other bytes only at its end."""
        assert self._start is not None
        self._body.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = b"".join(self._body)
        if self._context.pending and self._start["status"] == 200 and body.endswith(b"}"):
            body = body[:-1] + b',"mia":' + json.dumps(await self._take_event()).encode() + b"}"
        headers = [(name, value) for name, value in self._start["headers"] if name != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    async def _take_event(self) -> dict[str, Any]:
        if self._write_files is not None:
            return await self._write_files(self._context.take())
        return _event(self._take_fitting())

    def _take_fitting(self) -> list[Readouts]:
        """What has come, as far as it fits into an answer: writing JSON stops the event loop for everybody."""
        return [replace(one, items=self._fitting(one.items)) for one in self._context.take()]

    def _fitting(self, items: dict[str, Readout]) -> dict[str, Readout]:
        fitting: dict[str, Readout] = {}
        for name, item in items.items():
            if (taken := size_bytes(item)) <= self._room_bytes:
                self._room_bytes -= taken
                fitting[name] = item
            else:
                fitting[name] = not_complete(self._context.spec.captures[name], "dropped", TOO_LARGE)
                engine_metrics().count_dropped(TOO_LARGE)
        return fitting

    async def _send_part(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


def _is_event_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])


def _ends(message: Message) -> bool:
    """Whether this is an event stream's last frame, or comes after it."""
    return END_FRAME in message.get("body", b"") or not message.get("more_body", False)


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
