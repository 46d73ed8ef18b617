"""Who may use the aperture's own routes: those with vLLM's key, and nobody when the server has none.

vLLM's ``--api-key`` covers every path under ``/v1`` and has been checked before a route here is reached.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm import envs


class NoKeyError(Exception):
    """The server was started without an API key, so it cannot know who asks."""


def needs_key(request: Request) -> None:
    """A dependency of routes. Raises ``NoKeyError``."""
    # The same keys, found the same way, as vLLM's own middleware.
    if not any(request.app.state.args.api_key or [envs.VLLM_API_KEY]):
        raise NoKeyError


def refusal(status: int, kind: str, code: str, message: str) -> JSONResponse:
    """An error in OpenAI's shape."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


async def _no_key(_request: Request, _error: Exception) -> JSONResponse:
    message = "this needs a key, and this server has none: start vLLM with --api-key KEY or VLLM_API_KEY"
    return refusal(403, "permission_error", "no_api_key", message)


def attach(app: FastAPI) -> None:
    app.add_exception_handler(NoKeyError, _no_key)
