"""The scheduler: what the requests asked and one step's batch become routing entries at the taps.

Owns the requests that asked for something and the host memory that they may take, and fills the buffers before each
step. Never touches vLLM: a runner hands it one ``BatchView`` a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from guard.mia.buffers import GatherTap, IntArray, SteerEntries, TapBuffers
from guard.mia.ops import ADD, PROJECT, REPLACE
from guard.mia.spec import (
    MAX_VECTORS_PER_LAYER,
    AttentionCapture,
    Capture,
    HiddenCapture,
    MiaSpec,
    ProbeCapture,
    QKCapture,
    Steer,
)
from guard.mia.steering import Bank
from guard.mia.tracking import KEY_BLOCK_TOKENS, KeyStore, Tracked
from guard.mia.windows import Window, intervals, steered

NO_HIDDEN_ROWS = "no space for these rows in one step (max_hidden_rows_per_step)"
NO_QUERY_ROWS = "no space for these queries in one step (max_query_rows_per_step)"
NO_MEMORY = "no space for what is gathered of this request (max_host_bytes)"
CACHED = "part of the prompt came from the prefix cache"


@dataclass(frozen=True)
class BatchView:
    """One step's batch, complete when constructed. Tokens of request i are rows ``starts[i]:starts[i + 1]``.

    starts: ``[requests + 1]`` int32, host. computed: ``[requests]`` int32, host: tokens of each request that earlier
    steps computed, so row ``starts[i] + j`` is the request's token ``computed[i] + j``. samples: ``[requests]`` bool,
    host: whether the step samples a token of the request.
    """

    request_ids: list[str]
    starts: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    samples: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class KeyChunk:
    """Rows from ``slots[layer]`` on of each layer's key tap hold the request's tokens ``start:start + length``."""

    request_id: str
    slots: dict[int, int]
    start: int
    length: int


@dataclass(frozen=True)
class RowChunk:
    """Rows from ``slots[layer]`` on of a tap hold what a capture reads of the tokens ``start:start + length``.

    Of each layer's query tap for attention and for queries, else of the layer's hidden tap. ``next_token``: the first
    token that the step did not compute.
    """

    request_id: str
    capture: str
    slots: dict[int, int]
    start: int
    length: int
    next_token: int


@dataclass(frozen=True)
class SteerChunk:
    """Entries ``begin:end`` of a layer's steering tap belong to one request's steering ``index``.

    ``fresh``: from which entry on they are of tokens that no earlier step computed.
    """

    request_id: str
    index: int
    layer: int
    begin: int
    fresh: int
    end: int


@dataclass
class StepPlan:
    """What to read after the step. ``prompts_ended``: requests whose last prompt token is in it, and the first token
    after the step. ``sampled``: requests of which it gives an output, on which readouts can travel."""

    prompts_ended: dict[str, int] = field(default_factory=dict)
    key_chunks: list[KeyChunk] = field(default_factory=list)
    row_chunks: list[RowChunk] = field(default_factory=list)
    steer_chunks: list[SteerChunk] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)


MODES = {"add_vector": ADD, "project": PROJECT, "ablate": PROJECT, "replace": REPLACE}


class Router:
    """Requests in, routing entries out. ``probe_layers``: the layer that each of the engine's probes reads."""

    def __init__(self, buffers: TapBuffers, bank: Bank, probe_layers: dict[str, int], max_host_bytes: int) -> None:
        self._buffers = buffers
        self._bank = bank
        self._probe_layers = probe_layers
        self._max_host_bytes = max_host_bytes
        self._host_bytes = 0
        self._filled = False
        self.requests: dict[str, Tracked] = {}

    def add(self, request_id: str, spec: MiaSpec, prompt_len: int) -> None:
        """Start tracking. A capture that finds no space is tracked all the same and reads ``dropped``."""
        self.remove(request_id)
        tracked = Tracked.start(spec, prompt_len)
        if spec.attention or spec.qk:
            self._reserve_keys(tracked)
        for name, capture in tracked.captures.items():
            if name not in tracked.failed and not self._reserve(tracked, self._prompt_bytes(tracked, capture)):
                tracked.fail(name, NO_MEMORY)
        self.requests[request_id] = tracked

    def remove(self, request_id: str) -> None:
        tracked = self.requests.pop(request_id, None)
        if tracked is not None:
            self._release_rows(tracked)
            self._release_keys(tracked)

    def release_prompt(self, tracked: Tracked) -> None:
        """The prompt's readouts are sent: give back what was reserved for gathering them."""
        self._release_rows(tracked)
        if not tracked.needs_keys_to_the_end:
            self._release_keys(tracked)

    def _release_rows(self, tracked: Tracked) -> None:
        self._host_bytes -= tracked.reserved_bytes
        tracked.reserved_bytes = 0

    def _release_keys(self, tracked: Tracked) -> None:
        if tracked.keys is not None:
            self._host_bytes -= tracked.keys.size_bytes
            tracked.keys = None

    def _take(self, size_bytes: int) -> bool:
        if self._host_bytes + size_bytes > self._max_host_bytes:
            return False
        self._host_bytes += size_bytes
        return True

    def _reserve(self, tracked: Tracked, size_bytes: int) -> bool:
        if not self._take(size_bytes):
            return False
        tracked.reserved_bytes += size_bytes
        return True

    def _reserve_keys(self, tracked: Tracked) -> None:
        layers = sorted({n for capture in _with_heads(tracked).values() for n, _ in capture.heads})
        shapes = {layer: self._buffers.attention_shapes[layer] for layer in layers}
        length = tracked.prompt_len
        if self._take(sum(4 * length * s.key_heads * s.head_size for s in shapes.values())):
            keys = {layer: torch.empty(length, s.key_heads, s.head_size) for layer, s in shapes.items()}
            tracked.keys = KeyStore(keys)
        else:
            for name in _with_heads(tracked):
                tracked.fail(name, NO_MEMORY)

    def _prompt_bytes(self, tracked: Tracked, capture: Capture) -> int:
        """What a capture's readout of the prompt takes while it is gathered."""
        length = tracked.prompt_len
        rows = sum(
            min(end, length) - start for start, end in intervals(capture, tracked.spec, length) if start < length
        )
        if isinstance(capture, HiddenCapture):
            return 4 * rows * self._buffers.hidden[capture.layer].out.shape[1]
        if isinstance(capture, ProbeCapture):
            return 4 * rows
        if isinstance(capture, QKCapture):
            return 4 * rows * sum(self._buffers.attention_shapes[layer].head_size for layer, _ in capture.heads)
        return 4 * len(capture.heads) * length if capture.weights else 0

    def fill(self, batch: BatchView) -> StepPlan | None:
        """Write this step's entries into the taps; None when no request in the batch asks for anything."""
        if self._filled:
            self._buffers.clear()
            self._filled = False
        asking = [(i, id_) for i, id_ in enumerate(batch.request_ids) if id_ in self.requests] if self.requests else []
        if not asking:
            return None
        plan = StepPlan()
        gathered = _Gathered(self._buffers)
        runs_by_layer: dict[int, list[list[_SteerRun]]] = defaultdict(list)
        for i, request_id in asking:
            tracked = self.requests[request_id]
            rows = Window(int(batch.starts[i]), int(batch.computed[i]), int(batch.starts[i + 1] - batch.starts[i]))
            if tracked.captures:
                self._route_keys(request_id, tracked, rows, gathered, plan)
                self._route_rows(request_id, tracked, rows, gathered, plan)
            for layer, runs in self._route_steering(request_id, tracked, rows).items():
                runs_by_layer[layer].append(runs)
            if batch.samples[i]:
                plan.sampled.append(request_id)
            if tracked.seen < tracked.prompt_len <= rows.end:
                plan.prompts_ended[request_id] = rows.end
            tracked.seen = max(tracked.seen, rows.end)
        self._write(gathered, runs_by_layer, plan)
        return plan

    def _route_keys(self, request_id: str, tracked: Tracked, rows: Window, gathered: _Gathered, plan: StepPlan) -> None:
        store = tracked.keys
        if store is None:
            return
        if tracked.needs_keys_to_the_end and rows.end > store.room and not self._grow(tracked, store, rows.end):
            return
        wanted = rows.clip(0, store.room)
        if wanted:
            slots = {layer: gathered.key.place(layer, wanted) for layer in store.keys}
            plan.key_chunks.append(KeyChunk(request_id, slots, wanted.start, wanted.length))

    def _grow(self, tracked: Tracked, store: KeyStore, tokens: int) -> bool:
        """Room for the keys of ``tokens`` tokens, or the end of the captures that need them."""
        more = -(-(tokens - store.room) // KEY_BLOCK_TOKENS) * KEY_BLOCK_TOKENS
        if self._take(sum(4 * more * keys[0].numel() for keys in store.keys.values())):
            store.grow(more)
            return True
        for name in _with_heads(tracked):
            tracked.fail(name, NO_MEMORY)
        self._release_keys(tracked)
        return False

    def _route_rows(self, request_id: str, tracked: Tracked, rows: Window, gathered: _Gathered, plan: StepPlan) -> None:
        for name, capture in tracked.captures.items():
            if name in tracked.failed:
                continue
            layers, taps, full = self._rows_of(capture, gathered)
            for start, end in intervals(capture, tracked.spec, tracked.prompt_len):
                if max(start, tracked.seen) < min(end, rows.start):
                    tracked.fail(name, CACHED)
                    break
                wanted = rows.clip(max(start, tracked.seen), end)
                if not wanted:
                    continue
                if not all(taps.fits(layer, wanted) for layer in layers):
                    tracked.fail(name, full)
                    break
                slots = {layer: taps.place(layer, wanted) for layer in layers}
                plan.row_chunks.append(RowChunk(request_id, name, slots, wanted.start, wanted.length, rows.end))

    def _rows_of(self, capture: Capture, gathered: _Gathered) -> tuple[list[int], _Runs, str]:
        """The layers whose rows a capture reads, the taps that gather them, and the reason when those are full."""
        if isinstance(capture, HiddenCapture):
            return [capture.layer], gathered.hidden, NO_HIDDEN_ROWS
        if isinstance(capture, ProbeCapture):
            return [self._probe_layers[capture.probe]], gathered.hidden, NO_HIDDEN_ROWS
        return sorted({layer for layer, _ in capture.heads}), gathered.query, NO_QUERY_ROWS

    def _route_steering(self, request_id: str, tracked: Tracked, rows: Window) -> dict[int, list[_SteerRun]]:
        """What one request's steering does in this step, by layer, in the order in which it asked."""
        runs: dict[int, list[_SteerRun]] = defaultdict(list)
        for i, steer in enumerate(tracked.spec.steer):
            # Zero changes nothing, and leaving it out keeps the stream bit for bit.
            opened_at = tracked.steering[i].opened_at
            windows = steered(steer, tracked.prompt_len, opened_at, rows) if steer.coefficient != 0.0 else []
            if windows:
                old = sum(window.clip(0, tracked.seen).length for window in windows)
                slot = self._bank.slot(steer.vector)
                runs[steer.layer].append(_SteerRun(request_id, i, windows, steer, slot, old))
        return runs

    def _write(self, gathered: _Gathered, runs_by_layer: dict[int, list[list[_SteerRun]]], plan: StepPlan) -> None:
        for runs in (gathered.hidden, gathered.query, gathered.key):
            for layer, windows in runs.by_layer.items():
                runs.taps[layer].fill(_rows_of(windows))
        for layer, requests in runs_by_layer.items():
            passes = [[runs[p] for runs in requests if p < len(runs)] for p in range(MAX_VECTORS_PER_LAYER)]
            self._buffers.steer[layer].fill(_entries(passes))
            begin = 0
            for run in (run for one_pass in passes for run in one_pass):
                end = begin + run.length
                plan.steer_chunks.append(SteerChunk(run.request_id, run.index, layer, begin, begin + run.old, end))
                begin = end
        self._filled = True


def _with_heads(tracked: Tracked) -> dict[str, AttentionCapture | QKCapture]:
    return {**tracked.spec.attention, **tracked.spec.qk}


@dataclass(frozen=True)
class _SteerRun:
    """One steering of one request in this step. ``old``: tokens of it that an earlier step has computed before."""

    request_id: str
    index: int
    windows: list[Window]
    steer: Steer
    slot: int
    old: int

    @property
    def length(self) -> int:
        return sum(window.length for window in self.windows)


def _entries(passes: list[list[_SteerRun]]) -> SteerEntries:
    """Entries of one layer. Pass p has every request's p-th steering, so that no row occurs twice in a pass."""
    runs = [run for one_pass in passes for run in one_pass]
    lengths = [run.length for run in runs]

    def repeated(values: list[Any], dtype: Any) -> Any:
        return np.repeat(np.asarray(values, dtype=dtype), lengths)

    ends = np.cumsum([sum(run.length for run in one_pass) for one_pass in passes])
    return SteerEntries(
        rows=_rows_of([window for run in runs for window in run.windows]),
        slots=repeated([run.slot for run in runs], np.int64),
        modes=repeated([MODES[run.steer.method] for run in runs], np.int64),
        coefficients=repeated([run.steer.coefficient for run in runs], np.float32),
        targets=repeated([run.steer.target or 0.0 for run in runs], np.float32),
        keep_norm=repeated([run.steer.preserve_norm for run in runs], np.bool_),
        bounds=np.concatenate([[0], ends]).astype(np.int64),
    )


class _Runs:
    """Windows to gather, by layer, in the order in which the layer's tap will hold them. The same window is gathered
    once, however many captures read it."""

    def __init__(self, taps: dict[int, GatherTap]) -> None:
        self.taps = taps
        self.by_layer: dict[int, list[Window]] = defaultdict(list)
        self._lengths: dict[int, int] = defaultdict(int)
        self._slots: dict[tuple[int, Window], int] = {}

    def fits(self, layer: int, window: Window) -> bool:
        known = (layer, window) in self._slots
        return known or self._lengths[layer] + window.length <= self.taps[layer].capacity

    def place(self, layer: int, window: Window) -> int:
        """Where in the layer's tap the window will start."""
        if (layer, window) not in self._slots:
            self._slots[layer, window] = self._lengths[layer]
            self.by_layer[layer].append(window)
            self._lengths[layer] += window.length
        return self._slots[layer, window]


class _Gathered:
    def __init__(self, buffers: TapBuffers) -> None:
        self.hidden = _Runs(buffers.hidden)
        self.query = _Runs(buffers.query)
        self.key = _Runs(buffers.key)


def _rows_of(windows: Iterable[Window]) -> IntArray:
    return np.concatenate([np.arange(w.row, w.row + w.length, dtype=np.int64) for w in windows])
