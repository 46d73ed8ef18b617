"""The admin API, on a port of its own: what judges now, who uses which key, and reloading both.

Owns these routes and that each of them needs an admin key. It shows no key, no hash and nothing of any request, and
changes no file: what is wanted is in the files, this says what this process made of them. Numbers are of this process
since it started.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from guard.policy import PolicyStore
from guard.proxy.errors import ApiError, MethodError, NotFoundError
from guard.proxy.key_store import KeyStore, Use
from guard.proxy.keys import Caller
from guard.proxy.services import Services

ROOT = "/admin/v1"


def admin_app(services: Services) -> FastAPI:
    """Serve it while the application of the same ``services`` runs."""

    def needs_admin(request: Request) -> None:
        services.access.check_admin(request.headers)

    router = APIRouter(prefix=ROOT, dependencies=[Depends(needs_admin)])

    @router.get("/policies")
    async def policies() -> dict[str, Any]:
        return _policies(services.policies)

    @router.post("/policies/reload")
    async def reload_policies() -> dict[str, Any]:
        result = await asyncio.to_thread(services.policies.reload)
        return {"result": result, **_policies(services.policies)}

    @router.get("/keys")
    async def keys() -> dict[str, Any]:
        return _keys(services.access.keys)

    @router.post("/keys/reload")
    async def reload_keys() -> dict[str, Any]:
        read = services.access.keys.reload()
        return {"result": "success" if read else "failure", **_keys(services.access.keys)}

    @router.get("/upstreams")
    async def upstreams() -> dict[str, Any]:
        await services.upstream.healthy()
        known = services.upstream.replicas.all
        return {
            "upstreams": [{"url": one.url, "healthy": one.healthy, "in_flight": one.in_flight} for one in known],
            "requests_under_way": services.under_way,
            "draining": services.draining,
        }

    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.include_router(router)
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(HTTPException, _not_here)
    return app


def _policies(store: PolicyStore) -> dict[str, Any]:
    current = store.current
    return {
        "version": current.hash,
        "default": current.default.live.name,
        "policies": [{"name": one.name, "hash": one.hash} for one in current.policies],
        "error": store.error,
    }


def _keys(store: KeyStore) -> dict[str, Any]:
    ring = store.current
    entries = [("client", one) for one in (ring.callers or {}).values()]
    entries += [("admin", one) for one in (ring.admins or {}).values()]
    return {"keys": [_key(kind, caller, store.uses) for kind, caller in entries], "error": store.error}


def _key(kind: str, caller: Caller, uses: dict[str, Use]) -> dict[str, Any]:
    use = uses.get(caller.key_id or "", Use())
    return {
        "id": caller.key_id,
        "for": kind,
        "tenant": caller.tenant,
        "policy": caller.policy,
        "limits": caller.limits.model_dump(exclude_none=True),
        "tenant_limits": caller.tenant_limits.model_dump(exclude_none=True),
        "requests": use.requests,
        "tokens": use.tokens,
        "last_used": use.last.isoformat(timespec="seconds") if use.last is not None else None,
    }


async def _answer(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.to_wire(), error.status, headers=dict(error.headers))


async def _not_here(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return await _answer(request, MethodError(f"this path takes {allowed}", allowed))
    return await _answer(request, NotFoundError(f"the admin API is under {ROOT}: policies, keys, upstreams"))
