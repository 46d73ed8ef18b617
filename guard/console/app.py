"""The console's routes, beside the admin API on its port.

Owns paths, who may ask for which, and what a request of the playground may say. What is shown is made in ``views``,
``inspection`` and ``playground``.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from guard import __version__
from guard.console import views
from guard.console.contents import Content, Contents
from guard.console.inspection import inspect
from guard.console.playground import Playground, Run, text_of
from guard.console.sessions import COOKIE, LIFE_S, SAME_PAGE, Sessions
from guard.console.static_files import HEADERS, StaticFile, static_files
from guard.policy import BoundPolicy
from guard.proxy.admin import admin_app
from guard.proxy.app import names_of_models
from guard.proxy.body import parse_request
from guard.proxy.errors import ForbiddenHostError, InvalidKeyError, InvalidRequestError, NotFoundError, TooLargeError
from guard.proxy.keys import Caller
from guard.proxy.services import Services
from guard.proxy.wire_choices import chat_form
from guard.telemetry.recent import Finished

ROOT = "/console"
API = f"{ROOT}/api"

MAX_WAIT_S = 20.0
"""Longest time that a question for new requests waits for one. Shorter than any proxy's patience."""

MAX_LINES = 250
"""Most requests in one answer; it says whether there are more."""

MAX_BODY_BYTES = 1 << 20

BINS = 40
"""Of the distribution of recent scores."""

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


def operators_app(services: Services) -> ASGIApp:
    """The admin API with the console beside it; errors too have the console's headers. Serve it while the application
    of the same ``services`` runs."""
    app = admin_app(services)
    sessions = Sessions(services.access)
    app.include_router(_pages())
    app.include_router(_session_routes(sessions))
    app.include_router(_api(services, sessions))
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


def _api(services: Services, sessions: Sessions) -> APIRouter:
    contents = Contents(services.settings.ledger)
    playground = Playground(services, contents)

    def admin(request: Request) -> None:
        request.state.admin = sessions.admin(request.headers, request.cookies.get(COOKIE))

    router = APIRouter(prefix=API, dependencies=[Depends(admin)])

    def finished_at(number: int) -> Finished:
        found = services.recent.get(number)
        if found is None:
            raise NotFoundError("this request is not kept any more; the ledger has its line")
        return found

    @router.get("/overview")
    async def overview() -> Response:
        current = services.policies.current
        return _json(
            {
                "version": __version__,
                "policies": [_policy(one) for one in current.policies],
                "default": current.default.live.name,
                "policies_error": services.policies.error,
                "workers": services.settings.workers,
            }
        )

    @router.get("/requests")
    async def requests(after: int = 0, wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0) -> Response:
        """Those that ended after number ``after``, the oldest first; waits for one. ``newest`` is what to ask with
        next, at once where there are ``more``. A number from before a restart starts anew."""
        recent = services.recent
        after = after if after <= recent.newest else 0
        if recent.newest == after:
            await recent.wait(after, wait_s)
        newest, found = recent.newest, recent.after(after)
        if more := len(found) > MAX_LINES:
            found = found[:MAX_LINES]
            newest = found[-1].number

        def told() -> Response:
            return _json({"newest": newest, "more": more, "requests": list(map(views.line, found))})

        # In a thread: the proxy's own requests do not wait for people who look on.
        return await asyncio.to_thread(told)

    @router.get("/requests/{number}")
    async def request(number: int) -> Response:
        finished = finished_at(number)
        content = await contents.find(finished)
        return _json({**views.whole(finished), "content": _content(content) if content is not None else None})

    @router.post("/requests/{number}/inspection")
    async def inspection(request: Request, number: int) -> Response:
        finished = finished_at(number)
        content = await contents.find(finished)
        if content is None or not content.has_prompt or finished.judges is None:
            raise NotFoundError("the prompt of this request is not kept: its policy does not allow it, or it is gone")
        if finished.record.route != chat_form.route:
            raise InvalidRequestError(f"only requests of {chat_form.route} can be looked into")
        return _json(await inspect(services, finished.judges.live, content, finished.record.request_id))

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
        runs = await playground.run([found[name] for name in asked.policies], guarded, caller)
        return _json({"runs": [_run(one) for one in runs]})

    @router.get("/calibration")
    async def calibration() -> Response:
        detectors = views.calibration(services.policies.current.policies)
        return _json({"detectors": detectors, "recent": _recent_scores(services)})

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


def _content(content: Content) -> dict[str, Any]:
    messages = content.fields.get("messages")
    return {
        "messages": messages if isinstance(messages, list) else [],
        "answer": content.answer,
        "changes": content.changes,
        "notes": content.notes,
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


def _recent_scores(services: Services) -> dict[str, list[int]]:
    """KIND -> how many of the recent requests scored in each of ``BINS`` equal steps from 0 to 1."""
    counts: dict[str, list[int]] = {}
    for finished in services.recent.after(0):
        record = finished.record
        kinds = finished.judges.live.detector_kinds if finished.judges is not None else {}
        for name, score in {**record.scores, **(record.answer.scores if record.answer else {})}.items():
            if score.value is not None and name in kinds:
                bins = counts.setdefault(kinds[name], [0] * BINS)
                bins[min(BINS - 1, max(0, int(score.value * BINS)))] += 1
    return counts


def _json(value: Any) -> Response:
    # ASCII: what a client sent may have halves of surrogate pairs, which are no UTF-8.
    body = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(body, headers={**HEADERS, "cache-control": "no-store"}, media_type="application/json")


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return JSONResponse(_refusal(error.errors()[0], ("query",)).to_wire(), 400)
