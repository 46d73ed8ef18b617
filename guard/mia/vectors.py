"""The front end's side of the steering bank: which vectors the engine has, who uses them, adding and evicting.

The workers own the bank (``steering``); what is known here is asked of them, once, and changed only through here, so
one front end per engine may change it. A vector that a request under way uses never changes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from guard.mia.metrics import engine_metrics
from guard.mia.spec import MiaSpec

Refusal = Literal["full", "in_use", "unusable", "unknown"]

Call = Callable[..., Awaitable[list[Any]]]
"""vLLM's ``collective_rpc``: a method's name and ``args=(...)``; gives one result a worker."""


class VectorError(RuntimeError):
    """A vector cannot be loaded or evicted; ``refusal`` says what kind of reason it is."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


def raise_refusal(answers: list[Any]) -> None:
    """Raise ``VectorError`` when a worker refused. answers: one a worker, None or the refusal and its message."""
    if refused := [answer for answer in answers if answer is not None]:
        raise VectorError(*refused[0])


class EngineVectors:
    """One engine's vectors as its front end knows them. Lives on one event loop."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._digests: dict[str, str] | None = None
        self._in_use: Counter[str] = Counter()
        self._changing = asyncio.Lock()

    async def digests(self) -> dict[str, str]:
        """Digests of the vectors by name."""
        if self._digests is None:
            self._digests = (await self._call("mia_vectors"))[0]
        return self._digests

    @contextmanager
    def using(self, spec: MiaSpec) -> Iterator[None]:
        """Hold the vectors that a request names until it has ended."""
        names = {steer.vector for steer in spec.steer}
        self._in_use.update(names)
        try:
            yield
        finally:
            self._in_use.subtract(names)

    async def load(self, name: str) -> None:
        """Load or reload a vector from the operator's folder. Raises ``VectorError``."""
        async with self._changing:
            await self._change("mia_load_vector", name)

    async def evict(self, name: str) -> None:
        """Forget a vector. Raises ``VectorError``."""
        async with self._changing:
            if name not in await self.digests():
                raise VectorError("unknown", f"there is no steering vector {name!r}")
            await self._change("mia_evict_vector", name)

    async def _change(self, method: str, name: str) -> None:
        digests = await self.digests()
        if self._in_use[name] > 0:
            raise VectorError("in_use", f"steering vector {name!r} is in use by a running request")
        # Requests that come meanwhile are refused rather than steered by what is going.
        self._digests = {other: digest for other, digest in digests.items() if other != name}
        answers = await self._call(method, args=(name,))
        self._digests = (await self._call("mia_vectors"))[0]
        engine_metrics().bank_vectors.set(len(self._digests))
        raise_refusal(answers)
