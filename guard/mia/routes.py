"""Routes that the aperture adds to vLLM's API server, as an official endpoint plugin.

Loaded when ``VLLM_PLUGINS`` names ``mia``. The paths lie under ``/v1``, so vLLM's own ``--api-key`` covers them.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from guard import __version__
from guard.mia.engine_config import configured
from guard.mia.plugin import vllm_version
from guard.mia.spec import MiaSpec

router = APIRouter(prefix="/v1/mia")


@router.get("/capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
    """What this engine has taps for, and the JSON schema of a request's spec."""
    config = configured(request.app.state.vllm_config.additional_config)
    return {
        "object": "mia.capabilities",
        "mia_guard_version": __version__,
        "vllm_version": vllm_version(),
        "taps": None if config is None else config.model_dump(mode="json", exclude={"steering_folder"}),
        "spec_schema": MiaSpec.model_json_schema(),
    }


class MiaEndpoints:
    """vLLM's ``EndpointPlugin`` protocol."""

    name = "mia"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Nothing to prepare: routes read ``state.vllm_config``, which vLLM sets."""
