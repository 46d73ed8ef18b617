"""Routes that the aperture adds to vLLM's API server, as an official endpoint plugin.

Loaded when ``VLLM_PLUGINS`` names ``mia``.
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from guard import __version__
from guard.mia import access, vector_routes
from guard.mia.access import needs_key, refusal
from guard.mia.artifact_store import ArtifactNotFoundError, ArtifactStore, artifact_store
from guard.mia.artifacts import TENSOR_FILES
from guard.mia.engine_config import configured
from guard.mia.plugin import vllm_version
from guard.mia.spec import MiaSpec

READOUTS = "/readouts"
CHUNK_BYTES = 256 * 1024
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

router = APIRouter(prefix="/v1/mia")


@router.get("/capabilities")
async def capabilities(request: Request) -> Response:
    """What this engine serves and has taps for, where readouts can go, and the JSON schema of a request's spec."""
    # Made at the start: proxies ask every few seconds, and the schema takes milliseconds.
    return Response(request.app.state.mia_capabilities, media_type="application/json")


def _capabilities(vllm_config: Any) -> dict[str, Any]:
    config = configured(vllm_config.additional_config)
    folders = {"steering_folder", "probe_folder", "artifact_folder"}
    return {
        "object": "mia.capabilities",
        "mia_guard_version": __version__,
        "vllm_version": vllm_version(),
        "model": _model(vllm_config.model_config),
        "taps": None if config is None else config.model_dump(mode="json", exclude=folders),
        "deliver": ["answer", *(TENSOR_FILES if artifact_store(config) is not None else ())],
        "spec_schema": MiaSpec.model_json_schema(),
    }


def _model(config: Any) -> dict[str, Any]:
    """From vLLM's ``ModelConfig``: what readouts are of. Heads are the queries'; None for what one lacks."""
    text = config.hf_text_config
    return {
        "layers": getattr(text, "num_hidden_layers", None),
        "heads": getattr(text, "num_attention_heads", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization,
    }


def _store(request: Request) -> ArtifactStore:
    """What every route below works on. Raises ``NoKeyError`` and ``ArtifactNotFoundError``."""
    needs_key(request)
    store = artifact_store(configured(request.app.state.vllm_config.additional_config))
    if store is None:
        raise ArtifactNotFoundError
    return store


Store = Annotated[ArtifactStore, Depends(_store)]

# Not async: each blocks on the disk, so it runs in a thread, and so do the iterators that it returns.


@router.get(READOUTS + "/{artifact_id}")
def readouts(artifact_id: str, store: Store) -> StreamingResponse:
    """Readouts in the wire form that answers have, values and all."""
    pieces = store.json_with_values(artifact_id)
    return StreamingResponse(chain([next(pieces)], pieces), media_type="application/json", headers=HEADERS)


@router.get(READOUTS + "/{artifact_id}/{name}")
def readouts_file(artifact_id: str, name: str, store: Store) -> StreamingResponse:
    """One of the artifact's files as it is on the disk."""
    file, size_bytes = store.open_file(artifact_id, name)
    media_type = "application/json" if name.endswith(".json") else "application/octet-stream"
    headers = {**HEADERS, "content-length": str(size_bytes), "content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(_chunks(file), media_type=media_type, headers=headers)


@router.delete(READOUTS + "/{artifact_id}")
def remove_readouts(artifact_id: str, store: Store) -> dict[str, Any]:
    store.remove(artifact_id)
    return {"object": "mia.readouts.deleted", "id": artifact_id, "deleted": True}


@router.get(READOUTS + "{rest:path}", include_in_schema=False)
def no_readouts(store: Store) -> None:
    """Every other path below, so that it too is answered in OpenAI's shape."""
    raise ArtifactNotFoundError


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


async def _not_found(_request: Request, _error: Exception) -> JSONResponse:
    return refusal(404, "invalid_request_error", "readouts_not_found", "no such readouts, or they are too old")


class MiaEndpoints:
    """vLLM's ``EndpointPlugin`` protocol."""

    name = "mia"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        access.attach(app)
        vector_routes.attach(app)
        app.add_exception_handler(ArtifactNotFoundError, _not_found)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Raises ``ArtifactFolderError``, which ends the server. Routes read ``state``, which vLLM sets."""
        state.mia_capabilities = json.dumps(_capabilities(state.vllm_config)).encode()
        store = artifact_store(configured(state.vllm_config.additional_config))
        if store is not None:
            await asyncio.to_thread(store.prepare)
