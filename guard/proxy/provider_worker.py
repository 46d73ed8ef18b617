"""The process that litellm runs in: ``python -m guard.proxy.provider_worker SOCKET PROXY'S_PROCESS``.

Owns its server, which answers on a Unix socket in OpenAI's form, one request each connection, and its limits of memory
and work. A connection that is closed early ends what was asked. Logs no text of a request.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
from aiohttp import web

from guard.folded_log import Folded
from guard.proxy.provider_answer import Chunks, OddAnswerError, whole_answer
from guard.proxy.provider_call import Caller, chunks_of, failure_of, litellm_caller, opened
from guard.proxy.provider_clients import Traffic, current
from guard.proxy.provider_error import Failure, error_in_stream
from guard.proxy.provider_keys import FrameKeys, Keys, hide_in_answer, keys_in
from guard.proxy.provider_link import CHECK, FAILURE_HEADER, MODEL_HEADER, PING, USAGE, Model
from guard.proxy.provider_request import SENT
from guard.proxy.provider_trial import cannot_be_asked
from guard.proxy.wire import DATA, DONE, compact, whole_number

log = logging.getLogger("guard.providers")

MEMORY_BYTES = 2 << 30
"""Of data, as the kernel counts it: 168 MB once litellm 1.108.7 is loaded, and 8 more for each of its threads. What
would take more fails, and nothing else."""

WORK_S = 15.0
"""Time of the processor's that one piece of litellm's work in a thread may take; nothing else ends it."""

FULL, HALF_FULL = 0.9, 0.5
"""Of its memory. Full, it ends whatever is under way; half full, as soon as nothing is."""

BACKLOG = 65_535
"""Connections that may wait until the process comes to them; the kernel takes its own limit where that is lower."""

SPENT = 3
"""Exit code of a process that has come to a limit; another takes its place."""

PR_SET_PDEATHSIG = 1


class Answers:
    """``environment``: where litellm may find keys by itself."""

    def __init__(self, caller: Caller, environment: Mapping[str, str]) -> None:
        self._caller = caller
        self._found_keys = keys_in(environment)
        self.under_way = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.under_way += 1
        try:
            return await self._answer(request)
        finally:
            self.under_way -= 1

    async def check(self, request: web.Request) -> web.Response:
        """What of models can be found out without asking them."""
        models = msgspec.json.decode(await request.read(), type=list[Model])
        trials = (cannot_be_asked(self._caller, one, self._keys_of(one)) for one in models)
        return web.Response(body=msgspec.json.encode(await asyncio.gather(*trials)))

    def _keys_of(self, model: Model) -> Keys:
        return Keys({*self._found_keys, model.api_key or ""})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        model = msgspec.json.decode(request.headers[MODEL_HEADER], type=Model)
        keys = self._keys_of(model)
        fields = json.loads(await request.read())
        traffic = Traffic(model.may_ask, fields)
        current.set(traffic)
        result = None
        try:
            result = await self._caller.ask(request.path, fields, model)
            if fields.get("stream") is True:
                chunks = chunks_of(await opened(result))
                # For some, litellm sends nothing before it is asked for an answer's first piece.
                first = None if traffic.carried else await _first(chunks, traffic)
                _check_carried(traffic)
                return await _stream(request, first, chunks, fields, keys, traffic)
            _check_carried(traffic)
            endings = traffic.endings(streamed=False)
            whole = whole_answer(result, fields["model"], request.path, endings)
            hide_in_answer(keys, whole)
            return web.Response(body=compact(whole), content_type="application/json")
        except Exception as error:
            failure = failure_of(error, traffic, fields)
            if traffic.strayed is not None and not traffic.sent:
                log.warning("%s: not asked, since that would be at %s", model.name, traffic.strayed)
            if failure.kind == "unavailable":
                what = "litellm has no key for" if not traffic.sent else type(error).__name__
                log.warning("%s: %s %s", model.name, what, request.path)
            return _failed(failure, keys)
        finally:
            await _close(result)


def _check_carried(traffic: Traffic) -> None:
    """Raises ``OddAnswerError`` for an answer to something else than was asked."""
    if not traffic.carried:
        raise OddAnswerError


async def _first(chunks: AsyncIterator[Any], traffic: Traffic) -> Any:
    """A stream's first piece, None where it has none; the error of one that had begun."""
    try:
        return await anext(chunks, None)
    except Exception as error:
        if traffic.has_begun:
            return error
        raise


async def _stream(
    request: web.Request,
    first: Any,
    rest: AsyncIterator[Any],
    fields: Mapping[str, Any],
    keys: Keys,
    traffic: Traffic,
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    options = fields.get("stream_options")
    usage = isinstance(options, dict) and options.get("include_usage") is True
    chunks = Chunks(fields["model"], request.path, choices=whole_number(fields.get("n")) or 1, usage=usage)
    frames = FrameKeys(keys)
    await response.prepare(request)
    try:
        if isinstance(first, Exception):
            raise first
        if first is not None:
            await _pass(first, chunks, frames, response)
        async for one in rest:
            await _pass(one, chunks, frames, response)
        endings = traffic.endings(streamed=True)
        if traffic.odd or error_in_stream(traffic.heard) is not None:
            # litellm passes over some.
            raise OddAnswerError
        for told in chunks.end(endings):
            await _write(response, *frames.add(told))
        await _write(response, *frames.rest())
        await response.write(_told(chunks) + DATA + b" " + DONE + b"\n\n")
    except Exception:
        # What waits may be half of a key. Without a mark of the end, whoever reads here sees that it broke off.
        await response.write(_told(chunks))
        if (error := error_in_stream(traffic.heard)) is not None:
            told = {"message": "", "type": "server_error", "param": None, "code": None} | error
            keys.hide_in(told)
            await _write(response, {"error": told})
    await response.write_eof()
    return response


def _told(chunks: Chunks) -> bytes:
    return USAGE + compact({"usage": chunks.told}) + b"\n\n"


async def _pass(chunk: Any, chunks: Chunks, frames: FrameKeys, response: web.StreamResponse) -> None:
    if (told := chunks.add(chunk)) is not None:
        await _write(response, *frames.add(told))


async def _write(response: web.StreamResponse, *frames: dict[str, Any]) -> None:
    if frames:
        await response.write(b"".join(DATA + b" " + compact(frame) + b"\n\n" for frame in frames))


def _failed(failure: Failure, keys: Keys) -> web.Response:
    error = dict(failure.error)
    keys.hide_in(error)
    told = {name: value for name, value in failure.headers.items() if keys.hide(value) == value}
    headers = {**told, FAILURE_HEADER: failure.kind}
    body = compact({"error": error})
    return web.Response(body=body, status=failure.status, headers=headers, content_type="application/json")


async def _close(stream: Any) -> None:
    """Ends the request, if it has not ended: the provider stops generating."""
    while stream is not None:
        if (close := getattr(stream, "aclose", None)) is not None:
            try:
                await close()
            except Exception as error:
                log.warning("a stream was not closed: %s", type(error).__name__)
        stream = getattr(stream, "completion_stream", None)


class WatchedThreads(ThreadPoolExecutor):
    """Threads for litellm's work, with what each piece has taken of the processor so far."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="litellm")
        self._began: dict[int, tuple[int, float]] = {}

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._watched, work, *args, **kwargs)

    def _watched(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        self._began[thread] = clock, time.clock_gettime(clock)
        try:
            return work(*args, **kwargs)
        finally:
            del self._began[thread]

    def longest_s(self) -> float:
        return max((time.clock_gettime(clock) - began_s for clock, began_s in self._began.copy().values()), default=0.0)


async def _serve(path: str) -> None:
    threads = WatchedThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    answers = Answers(litellm_caller(), os.environ)
    _silence()

    async def ping(_: web.Request) -> web.Response:
        if why := _spent(threads.longest_s(), _filled(), answers.under_way):
            log.warning("the process for other providers ends: %s", why)
            os._exit(SPENT)
        return web.Response()

    # The proxy has a limit of its own.
    app = web.Application(client_max_size=0)
    app.router.add_get(PING, ping)
    app.router.add_post(CHECK, answers.check)
    for route in SENT:
        app.router.add_post(route, answers.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, path, backlog=BACKLOG).start()
    await asyncio.Event().wait()


def _spent(work_s: float, filled: float, under_way: int) -> str:
    """Why this process is of no more use; empty where it is. ``filled``: share of its memory."""
    if work_s > WORK_S:
        return "what one request has litellm do takes too long"
    if filled > FULL:
        return "what it is asked takes too much memory"
    if filled > HALF_FULL and not under_way:
        return "litellm keeps too much memory"
    return ""


def _filled() -> float:
    """Share of the memory that is taken. What litellm leaves of requests is in circles, which Python finds late: it is
    looked for before it counts."""
    filled = _data_bytes() / MEMORY_BYTES
    if filled <= HALF_FULL:
        return filled
    gc.collect()
    return _data_bytes() / MEMORY_BYTES


def _data_bytes() -> int:
    """As ``MEMORY_BYTES`` counts."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def _silence() -> None:
    """Others' log lines and warnings may quote requests."""
    logging.getLogger().addHandler(logging.NullHandler())
    for one in logging.Logger.manager.loggerDict.values():
        if isinstance(one, logging.Logger):
            one.handlers.clear()
    log.addHandler(logging.StreamHandler())
    log.addFilter(Folded())
    log.propagate = False


def _end_with(parent: int) -> None:
    """Linux: killed when the proxy is, at whatever litellm is then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the proxy has ended already")


def main(path: str, parent: str) -> None:
    _end_with(int(parent))
    # Ctrl-C and SIGTERM are for the guard, which ends this process when it has no more requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with open(os.devnull, "w") as sys.stdout:
        asyncio.run(_serve(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
