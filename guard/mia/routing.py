"""The scheduler: what the requests asked and one step's batch become routing entries at the taps.

Owns the state of every request that asked for something, from admission to the end, and fills the buffers before each
step. Never touches vLLM: a runner hands it one ``BatchView`` a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from guard.mia.buffers import IntArray, TapBuffers
from guard.mia.spec import MiaSpec, Steer


@dataclass(frozen=True)
class BatchView:
    """One step's batch, complete when constructed. Tokens of request i are rows ``starts[i]:starts[i + 1]``.

    starts: ``[requests + 1]`` int32, host. computed: ``[requests]`` int32, host: tokens of each request that earlier
    steps computed, so row ``starts[i] + j`` is the request's token ``computed[i] + j``.
    """

    request_ids: list[str]
    starts: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]


@dataclass
class KeyStore:
    """Keys of one request's prompt, gathered chunk by chunk.

    keys[layer]: ``[prompt_len, key_heads, head_size]`` float32, host.
    ``filled`` counts the tokens from the start without a gap; a chunk that starts beyond it leaves a gap for good.
    """

    keys: dict[int, torch.Tensor]
    filled: int = 0
    gap: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(keys.nbytes for keys in self.keys.values())


@dataclass
class Tracked:
    """One request that asked for something. ``keys`` is None when it reads no attention or there was no space."""

    spec: MiaSpec
    prompt_ids: list[int]
    keys: KeyStore | None
    read: bool = False
    """Whether its prompt readouts were delivered; a re-computation after preemption delivers nothing twice."""

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def captures(self) -> bool:
        return not self.read and bool(self.spec.hidden or self.spec.attention)


@dataclass(frozen=True)
class KeyChunk:
    """Rows from ``slots[layer]`` on of each layer's key tap hold the request's tokens ``start:start + length``."""

    request_id: str
    slots: dict[int, int]
    start: int
    length: int


@dataclass(frozen=True)
class FinishedPrompt:
    """Where the taps hold a last prompt token: its row in the hidden and the query tap of each layer."""

    hidden: dict[int, int]
    query: dict[int, int]


@dataclass
class StepPlan:
    """What to read after the step: chunks of keys, and the requests whose last prompt token was in it."""

    finishing: dict[str, FinishedPrompt] = field(default_factory=dict)
    chunks: list[KeyChunk] = field(default_factory=list)


class Router:
    """Requests in, routing entries out. ``vector_slots`` maps a steering vector's name to its row in the bank."""

    def __init__(self, buffers: TapBuffers, vector_slots: dict[str, int], max_key_bytes: int) -> None:
        self._buffers = buffers
        self._vector_slots = vector_slots
        self._max_key_bytes = max_key_bytes
        self._key_bytes = 0
        self._filled = False
        self.requests: dict[str, Tracked] = {}

    def add(self, request_id: str, spec: MiaSpec, prompt_ids: list[int]) -> None:
        """Start tracking. A request whose keys find no space is tracked all the same and reads ``dropped``."""
        self.remove(request_id)
        tracked = Tracked(spec, prompt_ids, keys=None)
        if spec.attention:
            tracked.keys = self._reserve_keys(spec, len(prompt_ids))
        self.requests[request_id] = tracked

    def remove(self, request_id: str) -> None:
        tracked = self.requests.pop(request_id, None)
        if tracked is not None:
            self.release_keys(tracked)

    def release_keys(self, tracked: Tracked) -> None:
        if tracked.keys is not None:
            self._key_bytes -= tracked.keys.size_bytes
            tracked.keys = None

    def _reserve_keys(self, spec: MiaSpec, prompt_len: int) -> KeyStore | None:
        layers = sorted({layer for capture in spec.attention.values() for layer, _ in capture.heads})
        shapes = {layer: self._buffers.attention_shapes[layer] for layer in layers}
        need_bytes = sum(4 * prompt_len * shape.key_heads * shape.head_size for shape in shapes.values())
        if self._key_bytes + need_bytes > self._max_key_bytes:
            return None
        self._key_bytes += need_bytes
        return KeyStore({n: torch.empty(prompt_len, shape.key_heads, shape.head_size) for n, shape in shapes.items()})

    def fill(self, batch: BatchView) -> StepPlan | None:
        """Write this step's entries into the taps; None when no request in the batch asks for anything."""
        if self._filled:
            self._buffers.clear()
            self._filled = False
        asking = [(i, id_) for i, id_ in enumerate(batch.request_ids) if id_ in self.requests] if self.requests else []
        if not asking:
            return None
        plan = StepPlan()
        gathered = _Gathered()
        steered: dict[int, list[_SteerRun]] = defaultdict(list)
        for i, request_id in asking:
            tracked = self.requests[request_id]
            rows = _Rows(int(batch.starts[i]), int(batch.starts[i + 1]), int(batch.computed[i]))
            if tracked.captures:
                self._route_captures(request_id, tracked, rows, gathered, plan)
            for steer in tracked.spec.steer:
                if run := self._route_steer(steer, tracked.prompt_len, rows):
                    steered[steer.layer].append(run)
        self._write(gathered, steered)
        return plan

    def _route_captures(
        self, request_id: str, tracked: Tracked, rows: _Rows, gathered: _Gathered, plan: StepPlan
    ) -> None:
        last = tracked.prompt_len - 1
        prompt_tokens = min(rows.end, rows.begin + tracked.prompt_len - rows.computed) - rows.begin
        store = tracked.keys
        if store is not None and prompt_tokens > 0:
            slots = gathered.key.add(store.keys, rows.begin, rows.begin + prompt_tokens)
            plan.chunks.append(KeyChunk(request_id, slots, rows.computed, prompt_tokens))
        if rows.holds(last):
            row = rows.row_of(last)
            hidden_layers = {capture.layer for capture in tracked.spec.hidden.values()}
            plan.finishing[request_id] = FinishedPrompt(
                hidden=gathered.hidden.add(hidden_layers, row, row + 1),
                query=gathered.query.add(store.keys if store else (), row, row + 1),
            )

    def _route_steer(self, steer: Steer, prompt_len: int, rows: _Rows) -> _SteerRun | None:
        begin, end = rows.begin, rows.end
        boundary = min(max(rows.begin + prompt_len - rows.computed, begin), end)
        if steer.phase == "prefill":
            end = boundary
        elif steer.phase == "decode":
            begin = boundary
        # Zero adds nothing, and leaving it out keeps the stream bit for bit.
        if begin == end or steer.coefficient == 0.0:
            return None
        return _SteerRun(begin, end, self._vector_slots[steer.vector], steer.coefficient)

    def _write(self, gathered: _Gathered, steered: dict[int, list[_SteerRun]]) -> None:
        buffers = self._buffers
        for runs, taps in (
            (gathered.hidden, buffers.hidden),
            (gathered.query, buffers.query),
            (gathered.key, buffers.key),
        ):
            for layer, rows in runs.by_layer.items():
                taps[layer].fill(_aranges(rows))
        for layer, steers in steered.items():
            lengths = [run.end - run.begin for run in steers]
            buffers.steer[layer].fill(
                _aranges([(run.begin, run.end) for run in steers]),
                np.repeat(np.asarray([run.slot for run in steers], dtype=np.int64), lengths),
                np.repeat(np.asarray([run.coefficient for run in steers], dtype=np.float32), lengths),
            )
        self._filled = True


@dataclass(frozen=True)
class _Rows:
    """One request's rows in the step, and how many of its tokens came before."""

    begin: int
    end: int
    computed: int

    def holds(self, token: int) -> bool:
        return self.computed <= token < self.computed + self.end - self.begin

    def row_of(self, token: int) -> int:
        return self.begin + token - self.computed


@dataclass(frozen=True)
class _SteerRun:
    begin: int
    end: int
    slot: int
    coefficient: float


@dataclass
class _Gathered:
    """Runs of rows to gather, by layer, in the order in which the taps will hold them."""

    hidden: _Runs = field(default_factory=lambda: _Runs())
    query: _Runs = field(default_factory=lambda: _Runs())
    key: _Runs = field(default_factory=lambda: _Runs())


class _Runs:
    """``by_layer[layer]`` is a list of ``[begin, end)`` runs of rows."""

    def __init__(self) -> None:
        self.by_layer: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._lengths: dict[int, int] = defaultdict(int)

    def add(self, layers: Iterable[int], begin: int, end: int) -> dict[int, int]:
        """Append a run to every layer's list; returns where in each layer's tap it will start."""
        slots = {}
        for layer in layers:
            slots[layer] = self._lengths[layer]
            self.by_layer[layer].append((begin, end))
            self._lengths[layer] += end - begin
        return slots


def _aranges(runs: list[tuple[int, int]]) -> IntArray:
    return np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in runs])
