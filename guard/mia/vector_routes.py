"""Steering vectors while the engine runs: what is loaded, loading one from the operator's folder, evicting one.

Needs a key, as reading readouts does. A client names a vector, never a file.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse

from guard.mia.access import needs_key, refusal
from guard.mia.engine_config import configured
from guard.mia.spec import Name
from guard.mia.vectors import EngineVectors, VectorError

STATUS = {"full": 429, "in_use": 409, "unusable": 400, "unknown": 404}
CODE = {
    "full": "steering_bank_full",
    "in_use": "steering_vector_in_use",
    "unusable": "steering_vector_unusable",
    "unknown": "steering_vector_not_found",
}

router = APIRouter(prefix="/v1/mia/vectors", dependencies=[Depends(needs_key)])


def vectors_of(app: Any) -> EngineVectors:
    """The application's one view of its engine's vectors."""
    if not hasattr(app.state, "mia_vectors"):
        app.state.mia_vectors = EngineVectors(app.state.engine_client.collective_rpc)
    vectors: EngineVectors = app.state.mia_vectors
    return vectors


def _vectors(request: Request) -> EngineVectors:
    config = request.app.state.vllm_config
    if configured(config.additional_config) is None:
        raise VectorError("unknown", "this engine was started without taps")
    return vectors_of(request.app)


def _changeable(request: Request) -> EngineVectors:
    if request.app.state.vllm_config.parallel_config._api_process_count > 1:
        raise VectorError("in_use", "several API server processes share this engine: vectors are fixed at its start")
    return _vectors(request)


Known = Annotated[EngineVectors, Depends(_vectors)]
Changeable = Annotated[EngineVectors, Depends(_changeable)]


@router.get("")
async def loaded(request: Request, vectors: Known) -> dict[str, Any]:
    """Names of the vectors that requests may use now, with the SHA-256 of their bytes, and the bank's room."""
    config = configured(request.app.state.vllm_config.additional_config)
    digests = await vectors.digests()
    return {
        "object": "mia.vectors",
        "capacity": 0 if config is None else config.bank_capacity,
        "vectors": [{"name": name, "sha256": digest} for name, digest in sorted(digests.items())],
    }


@router.put("/{name}")
async def load(name: Name, vectors: Changeable) -> dict[str, Any]:
    """Load ``NAME.safetensors`` from the operator's folder, or load it again. 429 when the bank is full."""
    await vectors.load(name)
    return {"object": "mia.vector", "name": name, "sha256": (await vectors.digests())[name]}


@router.delete("/{name}")
async def evict(name: Name, vectors: Changeable) -> dict[str, Any]:
    """Forget a vector. 409 while a running request uses it."""
    await vectors.evict(name)
    return {"object": "mia.vector.deleted", "name": name, "deleted": True}


@router.api_route("{rest:path}", methods=["GET", "HEAD", "PUT", "POST", "PATCH", "DELETE"], include_in_schema=False)
async def nothing_else(rest: str) -> JSONResponse:
    """Every other path and method below, so that it too is answered in OpenAI's shape."""
    message = "there is GET /v1/mia/vectors, and PUT and DELETE /v1/mia/vectors/NAME"
    return refusal(404, "invalid_request_error", "not_found", message)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, VectorError)
    return refusal(STATUS[error.refusal], "invalid_request_error", CODE[error.refusal], str(error))


def attach(app: FastAPI) -> None:
    app.include_router(router)
    app.add_exception_handler(VectorError, _refused)
