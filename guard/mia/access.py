"""Who may use the aperture: those with vLLM's key; and its own routes nobody when the server has none.

Relies on (vLLM 0.29): AuthenticationMiddleware.verify_token, GUARDED_PREFIX, envs.VLLM_API_KEY, and ``args.api_key`` in
the application's state. vLLM has checked the key before a route is reached, but not before a middleware is.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX, AuthenticationMiddleware


class NoKeyError(Exception):
    """The server was started without an API key, so it cannot know who asks."""


def needs_key(request: Request) -> None:
    """A dependency of routes. Raises ``NoKeyError``."""
    # The same keys, found the same way, as vLLM's own middleware.
    if not any(request.app.state.args.api_key or [envs.VLLM_API_KEY]):
        raise NoKeyError


def may_ask(scope: Any) -> bool:
    """Whether vLLM's own check of keys will let a request pass. What is said to those without a key is vLLM's alone."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    keys = [key for key in scope["app"].state.args.api_key or [envs.VLLM_API_KEY] if key]
    if not keys or not path.startswith(GUARDED_PREFIX):
        return True
    return AuthenticationMiddleware(scope["app"], keys).verify_token(Headers(scope=scope))


def refusal(status: int, kind: str, code: str, message: str) -> JSONResponse:
    """An error in OpenAI's shape."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


async def _no_key(_request: Request, _error: Exception) -> JSONResponse:
    message = "this needs a key, and this server has none: start vLLM with --api-key KEY or VLLM_API_KEY"
    return refusal(403, "permission_error", "no_api_key", message)


def attach(app: FastAPI) -> None:
    app.add_exception_handler(NoKeyError, _no_key)
