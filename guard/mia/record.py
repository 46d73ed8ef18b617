"""What one step has read, on its way from the worker to the front end.

Owns its three forms: copies that the device is still writing, the message, and the arrays at the other end. A message
says how the step's layout goes only when that is another than the step's before, so that it costs the same however many
requests it is of. The engine's core passes messages on and looks at none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter

from guard.mia.plan import StepLayout
from guard.mia.results import RAW, FloatArray, QKReadout
from guard.mia.row_ring import RingAddress

Rows = tuple[str, str, int]
"""Request, capture, and first token."""


@dataclass(frozen=True)
class StepCopies:
    """Tensors on the host, complete once the step's output is and ``ready``, if there is one, has passed.

    hidden: place in the ring of the rows ``[slots sent, hidden_size]``; None when there are none, or they found no
    space. values: float32, logits of probes and behind them attention masses, as ``layout`` says. doses: float32.
    opened_at: ``[gates]`` int32, after the step; empty without gates. weights: ``[tokens read, heads, tokens]``
    float32, ``[1, heads, tokens]`` where their sum alone is wanted. queries: with the keys that came.
    """

    layout: StepLayout
    offset: int
    hidden: int | None
    values: torch.Tensor
    doses: torch.Tensor
    opened_at: torch.Tensor
    weights: dict[Rows, torch.Tensor] = field(default_factory=dict)
    queries: dict[Rows, QKReadout] = field(default_factory=dict)
    ready: torch.cuda.Event | None = None


@dataclass(frozen=True)
class StepRecord:
    """The same as arrays. ``ended_at_s``: when they were complete, in seconds since 1970 by the worker's clock."""

    layout: StepLayout
    offset: int
    hidden: int | None
    values: FloatArray
    doses: FloatArray
    opened_at: npt.NDArray[np.int32]
    weights: dict[Rows, FloatArray]
    queries: dict[Rows, QKReadout]
    ended_at_s: float


@dataclass(frozen=True)
class Message:
    """``layout`` and ``request_ids``, those of the requests in it, only with the first record of a layout."""

    layout: bytes | None
    request_ids: tuple[str, ...] | None
    body: bytes


@dataclass(frozen=True)
class _Layout:
    """``layout``: without the plans that it has in common with the layout before."""

    ring: RingAddress
    layout: StepLayout


@dataclass(frozen=True)
class _Body:
    """``engine``: whose record it is, by its ring. weights, queries: the key of ``Rows``, and what is under it."""

    engine: str
    offset: int
    hidden: int | None
    values: bytes
    doses: bytes
    opened_at: bytes
    weights: list[tuple[Rows, tuple[int, ...], bytes]]
    queries: list[tuple[Rows, dict[str, Any]]]
    ended_at_s: float


_encoder = msgspec.msgpack.Encoder()
_layout_decoder = msgspec.msgpack.Decoder(_Layout)
_body_decoder = msgspec.msgpack.Decoder(_Body)
_qk = TypeAdapter(QKReadout)


class RecordWriter:
    """One worker's end."""

    def __init__(self, ring: RingAddress) -> None:
        self._ring = ring
        self._layout = 0

    def message(self, copies: StepCopies) -> Message:
        """Waits until the copies are complete."""
        if copies.ready is not None:
            copies.ready.synchronize()
        body = _Body(
            self._ring.path,
            copies.offset,
            copies.hidden,
            copies.values.numpy().tobytes(),
            copies.doses.numpy().tobytes(),
            copies.opened_at.numpy().tobytes(),
            [(rows, tuple(one.shape), one.numpy().tobytes()) for rows, one in copies.weights.items()],
            [(rows, _qk.dump_python(one, context=RAW)) for rows, one in copies.queries.items()],
            time.time(),
        )
        data = _encoder.encode(body)
        if copies.layout.number == self._layout:
            return Message(None, None, data)
        self._layout = copies.layout.number
        news = {id_: one for id_, one in copies.layout.requests.items() if id_ not in copies.layout.known}
        layout = _encoder.encode(_Layout(self._ring, replace(copies.layout, requests=news)))
        return Message(layout, tuple(copies.layout.requests), data)


class RecordReader:
    """The front end's end, for the records of all engines, each of which come in their order."""

    def __init__(self) -> None:
        self._layouts: dict[str, _Layout] = {}

    def _whole(self, new: _Layout, engine: str) -> _Layout:
        if not new.layout.known or engine not in self._layouts:
            return new
        # Layouts without any request of this front end were not sent here: what is missing is another one's.
        plans = self._layouts[engine].layout.requests
        known = {request_id: plans[request_id] for request_id in new.layout.known & plans.keys()}
        return replace(new, layout=replace(new.layout, requests=known | new.layout.requests))

    def read(self, layout: bytes | None, body: bytes) -> tuple[RingAddress, StepRecord]:
        """The record, and the ring of its engine."""
        fields = _body_decoder.decode(body)
        if layout is not None:
            self._layouts[fields.engine] = self._whole(_layout_decoder.decode(layout), fields.engine)
        known = self._layouts[fields.engine]
        record = StepRecord(
            known.layout,
            fields.offset,
            fields.hidden,
            np.frombuffer(fields.values, np.float32),
            np.frombuffer(fields.doses, np.float32),
            np.frombuffer(fields.opened_at, np.int32),
            {rows: np.frombuffer(data, np.float32).reshape(shape) for rows, shape, data in fields.weights},
            {rows: _qk.validate_python(one) for rows, one in fields.queries},
            fields.ended_at_s,
        )
        return known.ring, record
