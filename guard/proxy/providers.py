"""Models that other providers serve, asked through litellm: the answer comes in the forms in which vLLM's would.

Owns which models these are, and the way of a request to the process that litellm runs in (``provider_process``), which
is started where there is such a model. Nothing inside one can be read or steered; what that means is the policy's to
say.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from guard.proxy.answer import Answer, PlainAnswer, StreamedAnswer
from guard.proxy.body import QUICK_BYTES, GuardedRequest
from guard.proxy.client_threads import TextThreads
from guard.proxy.errors import (
    InvalidRequestError,
    UpstreamError,
    UpstreamLostError,
    UpstreamSilentError,
    upstream_errors,
)
from guard.proxy.provider_error import OURS
from guard.proxy.provider_file import ProviderModel, read_providers
from guard.proxy.provider_link import FAILURE_HEADER, MODEL_HEADER, USAGE, Model
from guard.proxy.provider_process import FROM_PROCESS, LOST, ProviderProcess, State
from guard.proxy.provider_request import check_request
from guard.proxy.wire import Texts
from guard.settings import SettingsError

log = logging.getLogger("guard.providers")

Count = Callable[[Any], None]

UNREAD = "another provider serves this model, and nothing inside it can be read"

CONVENTION_NAMES: Mapping[str, str] = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "vertex_ai": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}
"""litellm's name -> the well-known value of ``gen_ai.provider.name``, where they differ."""


class Providers:
    """``path`` None: no such models. Raises ``SettingsError``, with file, line and field."""

    def __init__(self, path: Path | None, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._models = {} if path is None else read_providers(path)
        self._keys = {one.api_key_env: _key(path, one.api_key_env) for one in self._models.values() if one.api_key_env}
        if self._models and importlib.util.find_spec("litellm") is None:
            raise SettingsError("providers (GUARD_PROVIDERS): needs litellm: pip install 'mia-guard[litellm]'")
        self._process: ProviderProcess | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For as long as the application lives. Without such models nothing is started."""
        if not self._models:
            yield
            return
        self._process = ProviderProcess([self._told(one) for one in self._models.values()], self._timeout_s)
        async with self._process.running():
            yield

    async def check(self) -> None:
        """Before anything else is started: whether all models can be asked. Raises ``SettingsError``."""
        async with self.running():
            await self.started()

    async def started(self) -> None:
        """Once it is known whether all models can be asked. Raises ``SettingsError``."""
        if self._process is None:
            return
        if not await self._process.tried():
            raise SettingsError(
                "providers (GUARD_PROVIDERS): the process that asks them does not start, as logged above"
            )
        if whys := self._whys:
            told = "; ".join(
                f"models.{name}: {self._models[name].model} cannot be asked: {why}" for name, why in whys.items()
            )
            raise SettingsError(f"{self._path}: {told}")

    @property
    def state(self) -> State | None:
        """Of the process that asks them; None where there is none."""
        return None if self._process is None else self._process.state

    @property
    def ready(self) -> bool:
        """Whether everything that they need was there once."""
        return self._process is None or (self._process.was_up and not self._whys)

    @property
    def _whys(self) -> dict[str, str]:
        """Why a model cannot be asked, of those that cannot."""
        whys = () if self._process is None else self._process.why_not
        return {name: why for name, why in zip(self._models, whys, strict=False) if why is not None}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    @property
    def bases(self) -> tuple[str, ...]:
        """Addresses that are not the providers' own."""
        return tuple(one.api_base for one in self._models.values() if one.api_base)

    def has(self, model: str) -> bool:
        return model in self._models

    def provider_of(self, model: str) -> str:
        """Who serves it, as OpenTelemetry's conventions call them, or else as litellm does."""
        name = self._models[model].provider
        return CONVENTION_NAMES.get(name, name)

    @asynccontextmanager
    async def ask(
        self, path: str, request: GuardedRequest[Texts], via: str, threads: TextThreads, count: Count
    ) -> AsyncIterator[asyncio.Task[Answer]]:
        """As ``Upstream.ask``, of a model that is here. ``via``: the guards that the request came through. ``threads``:
        for a long body. ``count``: gets what a stream tells of its usage."""
        asked = _Asked()
        opening = asyncio.create_task(self._open(path, request, via, threads, count, asked))
        try:
            yield opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            asked.leave()

    async def _open(
        self,
        path: str,
        request: GuardedRequest[Texts],
        via: str,
        threads: TextThreads,
        count: Count,
        asked: _Asked,
    ) -> Answer:
        model = self._models[request.model]
        check = partial(check_request, path, request.fields, model.provider)
        if request.characters > QUICK_BYTES:
            await threads.parse(check)
        else:
            check()
        await request.written(threads)
        assert self._process is not None, "the application's lifespan has not begun"
        await self._process.there()
        if (why := self._whys.get(request.model)) is not None:
            log.error("model %s cannot be asked: %s", request.model, why)
            raise UpstreamError(OURS)
        told = json.dumps(msgspec.to_builtins(self._told(model, via)))
        headers = {"content-type": "application/json", MODEL_HEADER: told}
        asked.response = response = await self._process.post(path, request.to_json(), headers)
        failure = response.headers.get(FAILURE_HEADER)
        if failure is None and response.status != 200:
            # Not by ``provider_worker``: the server that it runs in.
            raise UpstreamLostError(LOST)
        if response.status == 200 and response.content_type == "text/event-stream":
            return _Stream(_Reply(response), count)
        if failure in ("refused", "unavailable"):
            with upstream_errors(FROM_PROCESS):
                error = json.loads(await response.read())["error"]
            if failure == "refused":
                raise InvalidRequestError(error["message"], error["param"])
            raise (UpstreamSilentError if response.status == 504 else UpstreamError)(error["message"])
        return PlainAnswer(_Reply(response))

    def _told(self, model: ProviderModel, via: str | None = None) -> Model:
        # A provider's own address leads nowhere else.
        base, key = model.api_base, self._keys.get(model.api_key_env or "")
        may_ask = (base, *model.may_ask) if base else ()
        return Model(model.model, base, key, via if base else None, self._timeout_s, may_ask)


class _Asked:
    def __init__(self) -> None:
        self.response: aiohttp.ClientResponse | None = None

    def leave(self) -> None:
        """Ends the request, if it has not ended: the provider stops generating."""
        if self.response is not None:
            self.response.close()


class _Stream(StreamedAnswer):
    def __init__(self, response: _Reply, count: Count) -> None:
        super().__init__(response)
        self._count = count

    def _sorted(self, frames: list[bytes]) -> list[bytes]:
        told = [frame for frame in frames if frame.startswith(USAGE)]
        for frame in told:
            self._count(json.loads(frame.removeprefix(USAGE)))
        return super()._sorted([frame for frame in frames if not frame.startswith(USAGE)] if told else frames)


class _Reply:
    """An answer of that process, whose errors are those of a provider."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status, self.headers, self.content = response.status, response.headers, self
        self._content = response.content

    async def readany(self) -> bytes:
        with upstream_errors(FROM_PROCESS):
            return await self._content.readany()


def _key(path: Path | None, name: str) -> str:
    key = os.environ.get(name)
    if not key:
        raise SettingsError(f"{path}: the environment has no {name}, which is to hold a provider's key")
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{path}: {name} has characters that no key has: it must be printable ASCII, in one line")
    return key
