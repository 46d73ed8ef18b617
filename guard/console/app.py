"""The console's routes, beside the admin API on its port.

Owns paths, who may ask for which, and what a request of the playground may say. What is shown is made in ``ended``,
of this process, ``together``, of all, and ``playground``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from guard import __version__
from guard.console import views
from guard.console.contents import Contents
from guard.console.ended import Answer, Ended, Question, Source
from guard.console.playground import Playground, Run, text_of
from guard.console.sessions import COOKIE, LIFE_S, SAME_PAGE, Sessions
from guard.console.static_files import HEADERS, StaticFile, static_files
from guard.console.together import CURSOR, Together
from guard.policy import BoundPolicy
from guard.proxy.admin import admin_app
from guard.proxy.app import names_of_models
from guard.proxy.body import parse_request
from guard.proxy.errors import ForbiddenHostError, InvalidKeyError, InvalidRequestError, NotFoundError, TooLargeError
from guard.proxy.exchange import ClientGoneError, until_left
from guard.proxy.keys import Caller
from guard.proxy.services import Services
from guard.proxy.wire_choices import chat_form

ROOT = "/console"
API = f"{ROOT}/api"

MAX_WAIT_S = 20.0
"""Longest time that a question for new requests waits for one. Shorter than any proxy's patience."""

MAX_BODY_BYTES = 1 << 20

MAX_CURSOR = 1 << 14
"""In characters; it has some 30 for each worker process."""

NOBODY_READS = 499
"""Status of an answer that goes nowhere: who asked has left, and the engine's work for it has ended."""

PolicyName = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=100_000)]


class PlaygroundRequest(BaseModel):
    """What is tried, and through which policies."""

    model_config = ConfigDict(extra="forbid")

    policies: Annotated[list[PolicyName], Field(min_length=1, max_length=2)]
    model: Annotated[str, Field(min_length=1, max_length=256)]
    system: Text = ""
    prompt: Annotated[Text, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2048)] = 128
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0


def operators_app(services: Services, others: Sequence[Source] = ()) -> ASGIApp:
    """The admin API with the console beside it; errors too have the console's headers. Serve it while the application
    of the same ``services`` runs. ``others``: the other worker processes, whose requests the console shows too."""
    app = admin_app(services)
    sessions = Sessions(services.access)
    app.include_router(_pages())
    app.include_router(_session_routes(sessions))
    app.include_router(_api(services, others, sessions))
    app.add_exception_handler(RequestValidationError, _invalid)
    return _with_headers(app)


def _with_headers(app: ASGIApp) -> ASGIApp:
    """Around everything, the answers to what nobody foresaw among them: a browser may be made to open any address."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await app(scope, receive, sending if scope["type"] == "http" else send)

    return answering


def _pages() -> APIRouter:
    """Files that hold nothing of any request, for everybody who can reach the port: the sign-in form is among them."""
    files, router = static_files(), APIRouter()

    def page(request: Request) -> Response:
        return files["index.html"].response(request)

    def file(request: Request, name: str) -> Response:
        found: StaticFile | None = files.get(name)
        if found is None:
            raise NotFoundError("the console has no such file")
        return found.response(request)

    router.add_api_route("/", lambda: RedirectResponse(f"{ROOT}/"), methods=["GET"])
    router.add_api_route(ROOT, lambda: RedirectResponse(f"{ROOT}/"), methods=["GET"])
    router.add_api_route(f"{ROOT}/", page, methods=["GET"], response_model=None)
    router.add_api_route(f"{ROOT}/static/{{name}}", file, methods=["GET"], response_model=None)
    return router


def _session_routes(sessions: Sessions) -> APIRouter:
    router = APIRouter(prefix=f"{API}/session")

    @router.post("")
    async def begin(request: Request) -> Response:
        _need_own_page(request)
        response = _json({"signed_in": True})
        response.set_cookie(
            COOKIE,
            sessions.begin(request.headers),
            max_age=round(LIFE_S),
            path=ROOT,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    @router.get("")
    async def known(request: Request) -> Response:
        try:
            sessions.admin(request.headers, request.cookies.get(COOKIE))
        except InvalidKeyError:
            return _json({"signed_in": False})
        return _json({"signed_in": True})

    @router.delete("")
    async def end(request: Request) -> Response:
        _need_own_page(request)
        sessions.end(request.cookies.get(COOKIE, ""))
        response = _json({"signed_in": False})
        response.delete_cookie(COOKIE, path=ROOT)
        return response

    return router


def _api(services: Services, others: Sequence[Source], sessions: Sessions) -> APIRouter:
    contents = Contents(services.ledger)
    playground = Playground(services, contents)
    together = Together((Ended(services, contents), *others))

    def admin(request: Request) -> None:
        request.state.admin = sessions.admin(request.headers, request.cookies.get(COOKIE))

    router = APIRouter(prefix=API, dependencies=[Depends(admin)])

    @router.get("/overview")
    async def overview() -> Response:
        current = services.policies.current
        return _json(
            {
                "version": __version__,
                "policies": [_policy(one) for one in current.policies],
                "default": current.default.live.name,
                "policies_error": await together.policies_error(),
                "workers": services.settings.workers,
            }
        )

    @router.get("/requests")
    async def requests(
        after: Annotated[str, Query(max_length=MAX_CURSOR, pattern=CURSOR)] = "",
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
    ) -> Response:
        """Those that ended after ``after``, the oldest first; waits for one. ``cursor`` is what to ask with next, at
        once where there are ``more``. What it says of a process that has started again is left out."""
        return await asyncio.to_thread(_json, await together.lines(after, wait_s))

    @router.get("/requests/{request_id}")
    async def request(request_id: str) -> Response:
        return _told(await together.one(Question("page", request_id)))

    @router.post("/requests/{request_id}/inspection")
    async def inspection(request: Request, request_id: str) -> Response:
        try:
            return _told(await until_left(request.receive, together.one(Question("inspection", request_id))))
        except ClientGoneError:
            return Response(status_code=NOBODY_READS)

    @router.get("/playground")
    async def choices() -> Response:
        found = await asyncio.to_thread(playground.choices)
        live = {one.name for one in services.policies.current.policies}
        models = await names_of_models(services, "console")
        return _json(
            {"policies": [{**_policy(one), "live": name in live} for name, one in found.items()], "models": models}
        )

    @router.post("/playground")
    async def run(request: Request) -> Response:
        caller: Caller = request.state.admin
        asked = _asked(await _body_of(request))
        found = await asyncio.to_thread(playground.choices)
        if unknown := [name for name in asked.policies if name not in found]:
            raise InvalidRequestError(f"there is no policy {unknown[0]!r} to try", "policies")
        guarded = parse_request(chat_form, _body(asked))
        runs = await playground.run([found[name] for name in asked.policies], guarded, caller, request.receive)
        return _json({"runs": [_run(one) for one in runs]})

    @router.get("/calibration")
    async def calibration() -> Response:
        detectors = views.calibration(services.policies.current.policies)
        return _json({"detectors": detectors, "recent": await together.scores()})

    return router


def _need_own_page(request: Request) -> None:
    """Raises ``ForbiddenHostError`` for a page of another origin, which can neither sign somebody in nor out."""
    if request.headers.get(SAME_PAGE[0]) != SAME_PAGE[1]:
        raise ForbiddenHostError(f"this is for the console's own page, which sends {SAME_PAGE[0]}")


def _policy(policy: BoundPolicy) -> dict[str, Any]:
    return {
        "name": policy.name,
        "hash": policy.hash[:12],
        "detectors": policy.detector_kinds,
        "rules": [one.rule.name for one in policy.rules],
    }


async def _body_of(request: Request) -> bytes:
    """Read here, and not by the framework: it would read any length, and before it is known who asks.

    Raises ``TooLargeError``.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise TooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _asked(raw: bytes) -> PlaygroundRequest:
    """Raises ``InvalidRequestError`` that names the field."""
    try:
        return PlaygroundRequest.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], ()) from None


def _refusal(first: Any, below: tuple[str, ...]) -> InvalidRequestError:
    """``first``: of pydantic's errors; ``below``: what its place begins with that nobody has written."""
    where = ".".join(str(one) for one in first["loc"][len(below) :])
    return InvalidRequestError(f"{where}: {first['msg']}" if where else str(first["msg"]), where or None)


def _body(asked: PlaygroundRequest) -> bytes:
    messages = [{"role": "system", "content": asked.system}] if asked.system else []
    messages.append({"role": "user", "content": asked.prompt})
    return json.dumps(
        {
            "model": asked.model,
            "messages": messages,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
        }
    ).encode()


def _run(run: Run) -> dict[str, Any]:
    error = run.body.get("error") if isinstance(run.body, dict) else None
    return {
        "status": run.status,
        "answer": text_of(run.body),
        "error": error.get("message") if isinstance(error, dict) else None,
        "request": views.whole(run.finished),
    }


def _told(answer: Answer) -> Response:
    return _json(answer.body, answer.status)


def _json(value: Any, status: int = 200) -> Response:
    # ASCII: what a client sent may have halves of surrogate pairs, which are no UTF-8.
    body = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(body, status, {**HEADERS, "cache-control": "no-store"}, "application/json")


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return JSONResponse(_refusal(error.errors()[0], ("query",)).to_wire(), 400)
