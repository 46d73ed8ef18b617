"""The scheduler: what the requests asked and one step's batch become routing entries at the taps.

Owns the state of every request that asked for something, from admission to the end, and fills the buffers before each
step. Never touches vLLM: a runner hands it one ``BatchView`` a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from guard.mia.buffers import GatherTap, IntArray, SteerEntries, TapBuffers
from guard.mia.ops import ADD, PROJECT, REPLACE
from guard.mia.spec import MAX_VECTORS_PER_LAYER, HiddenCapture, MiaSpec, SpanPositions, Steer, TokenRanges
from guard.mia.steering import Bank

NO_ROWS = "no space for these rows in one step (max_hidden_rows_per_step)"
NO_MEMORY = "no space for what is gathered of this prompt (max_host_bytes)"
CACHED = "part of the prompt came from the prefix cache"
ENDLESS = 2**31


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


@dataclass(frozen=True)
class Rows:
    """Gathered rows of one capture. values: ``[len(positions), hidden_size]`` float32, host."""

    positions: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


@dataclass
class Tracked:
    """One request that asked for something.

    ``seen``: its tokens below this one have been through the taps, so that a re-computation after preemption delivers
    nothing twice. ``keys`` is None when it reads no attention, or there was no space. ``rows``: what was gathered and
    not yet sent, by capture. ``failed``: captures that cannot become complete any more, and why; ``told``: those
    among them that go on through the answer and whose failure was sent.
    """

    spec: MiaSpec
    prompt_len: int
    keys: KeyStore | None = None
    reserved_bytes: int = 0
    seen: int = 0
    rows: dict[str, list[Rows]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    @property
    def captures(self) -> bool:
        return bool(self.spec.hidden or self.spec.attention)


@dataclass(frozen=True)
class KeyChunk:
    """Rows from ``slots[layer]`` on of each layer's key tap hold the request's tokens ``start:start + length``."""

    request_id: str
    slots: dict[int, int]
    start: int
    length: int


@dataclass(frozen=True)
class RowChunk:
    """Rows from ``slot`` on of the layer's hidden tap hold the request's tokens ``start:start + length``."""

    request_id: str
    capture: str
    layer: int
    slot: int
    start: int
    length: int


@dataclass
class StepPlan:
    """What to read after the step. ``prompts_ended``: by request, the row of its last prompt token in each layer's
    query tap. ``sampled``: requests of which this step gives an output, on which readouts can travel."""

    prompts_ended: dict[str, dict[int, int]] = field(default_factory=dict)
    key_chunks: list[KeyChunk] = field(default_factory=list)
    row_chunks: list[RowChunk] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)


MODES = {"add_vector": ADD, "project": PROJECT, "ablate": PROJECT, "replace": REPLACE}


class Router:
    """Requests in, routing entries out."""

    def __init__(self, buffers: TapBuffers, bank: Bank, max_host_bytes: int) -> None:
        self._buffers = buffers
        self._bank = bank
        self._max_host_bytes = max_host_bytes
        self._host_bytes = 0
        self._filled = False
        self.requests: dict[str, Tracked] = {}

    def add(self, request_id: str, spec: MiaSpec, prompt_len: int) -> None:
        """Start tracking. A capture whose prompt finds no space is tracked all the same and reads ``dropped``."""
        self.remove(request_id)
        tracked = Tracked(spec, prompt_len)
        if spec.attention:
            self._reserve_keys(tracked)
        for name, capture in spec.hidden.items():
            self._reserve_rows(tracked, name, capture)
        self.requests[request_id] = tracked

    def remove(self, request_id: str) -> None:
        tracked = self.requests.pop(request_id, None)
        if tracked is not None:
            self.release_prompt(tracked)

    def release_prompt(self, tracked: Tracked) -> None:
        """Give back what was reserved for gathering the prompt."""
        self._host_bytes -= tracked.reserved_bytes
        tracked.reserved_bytes = 0
        tracked.keys = None

    def _reserve(self, tracked: Tracked, size_bytes: int) -> bool:
        if self._host_bytes + size_bytes > self._max_host_bytes:
            return False
        self._host_bytes += size_bytes
        tracked.reserved_bytes += size_bytes
        return True

    def _reserve_keys(self, tracked: Tracked) -> None:
        layers = sorted({layer for capture in tracked.spec.attention.values() for layer, _ in capture.heads})
        shapes = {layer: self._buffers.attention_shapes[layer] for layer in layers}
        length = tracked.prompt_len
        if self._reserve(tracked, sum(4 * length * s.key_heads * s.head_size for s in shapes.values())):
            keys = {layer: torch.empty(length, s.key_heads, s.head_size) for layer, s in shapes.items()}
            tracked.keys = KeyStore(keys)
        else:
            tracked.failed |= dict.fromkeys(tracked.spec.attention, NO_MEMORY)

    def _reserve_rows(self, tracked: Tracked, name: str, capture: HiddenCapture) -> None:
        rows = sum(
            min(end, tracked.prompt_len) - start
            for start, end in _intervals(capture, tracked)
            if start < tracked.prompt_len
        )
        if not self._reserve(tracked, 4 * rows * self._buffers.hidden[capture.layer].out.shape[1]):
            tracked.failed[name] = NO_MEMORY

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
        steered: dict[int, list[list[_SteerRun]]] = defaultdict(list)
        for i, request_id in asking:
            tracked = self.requests[request_id]
            rows = _Window(int(batch.starts[i]), int(batch.computed[i]), int(batch.starts[i + 1] - batch.starts[i]))
            if tracked.captures:
                self._route_attention(request_id, tracked, rows, gathered, plan)
                self._route_hidden(request_id, tracked, rows, gathered, plan)
                if batch.samples[i]:
                    plan.sampled.append(request_id)
                tracked.seen = max(tracked.seen, rows.end)
            for layer, runs in self._route_steering(tracked, rows).items():
                steered[layer].append(runs)
        self._write(gathered, steered)
        return plan

    def _route_attention(
        self, request_id: str, tracked: Tracked, rows: _Window, gathered: _Gathered, plan: StepPlan
    ) -> None:
        store = tracked.keys
        prompt = rows.clip(0, tracked.prompt_len)
        if store is not None and prompt:
            slots = {layer: gathered.key.add(layer, prompt) for layer in store.keys}
            plan.key_chunks.append(KeyChunk(request_id, slots, prompt.start, prompt.length))
        last = rows.clip(max(tracked.seen, tracked.prompt_len - 1), tracked.prompt_len)
        if last:
            layers = store.keys if store is not None else ()
            plan.prompts_ended[request_id] = {layer: gathered.query.add(layer, last) for layer in layers}

    def _route_hidden(
        self,
        request_id: str,
        tracked: Tracked,
        rows: _Window,
        gathered: _Gathered,
        plan: StepPlan,
    ) -> None:
        for name, capture in tracked.spec.hidden.items():
            if name in tracked.failed:
                continue
            for start, end in _intervals(capture, tracked):
                if max(start, tracked.seen) < min(end, rows.start):
                    tracked.failed[name] = CACHED
                    break
                wanted = rows.clip(max(start, tracked.seen), end)
                if not wanted:
                    continue
                if not gathered.hidden.fits(capture.layer, wanted, self._buffers.hidden[capture.layer]):
                    tracked.failed[name] = NO_ROWS
                    break
                slot = gathered.hidden.add(capture.layer, wanted)
                plan.row_chunks.append(RowChunk(request_id, name, capture.layer, slot, wanted.start, wanted.length))

    def _route_steering(self, tracked: Tracked, rows: _Window) -> dict[int, list[_SteerRun]]:
        """What one request's steering does in this step, by layer, in the order in which it asked."""
        runs: dict[int, list[_SteerRun]] = defaultdict(list)
        for steer in tracked.spec.steer:
            # Zero changes nothing, and leaving it out keeps the stream bit for bit.
            windows = _steered(steer, tracked.prompt_len, rows) if steer.coefficient != 0.0 else []
            if windows:
                runs[steer.layer].append(_SteerRun(windows, steer, self._bank.slot(steer.vector)))
        return runs

    def _write(self, gathered: _Gathered, steered: dict[int, list[list[_SteerRun]]]) -> None:
        buffers = self._buffers
        for runs, taps in (
            (gathered.hidden, buffers.hidden),
            (gathered.query, buffers.query),
            (gathered.key, buffers.key),
        ):
            for layer, windows in runs.by_layer.items():
                taps[layer].fill(_rows_of(windows))
        for layer, requests in steered.items():
            buffers.steer[layer].fill(_entries(requests))
        self._filled = True


def _intervals(capture: HiddenCapture, tracked: Tracked) -> Iterator[tuple[int, int]]:
    """Half-open ranges of a request's tokens that a capture reads, in order and apart."""
    positions, length = capture.positions, tracked.prompt_len
    if isinstance(positions, SpanPositions):
        span = tracked.spec.spans[positions.span]
        assert isinstance(span, TokenRanges)
        positions = span
    if isinstance(positions, TokenRanges):
        yield from merged(positions)
        return
    begin = {"last_prompt": length - 1, "prompt": 0, "generated": length, "all": 0}[positions]
    yield begin, ENDLESS if capture.generates else length


def merged(ranges: TokenRanges) -> list[tuple[int, int]]:
    """The same tokens in ranges that are in order and do not overlap."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(ranges.tokens):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


@dataclass(frozen=True)
class _Window:
    """Tokens ``start:start + length`` of one request, in the step's rows from ``row`` on. False when empty."""

    row: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def clip(self, start: int, end: int) -> _Window:
        """The part inside ``[start, end)``."""
        begin, stop = max(start, self.start), min(end, self.end)
        return _Window(self.row + begin - self.start, begin, max(0, stop - begin))

    def __bool__(self) -> bool:
        return self.length > 0


@dataclass(frozen=True)
class _SteerRun:
    """One steering of one request in this step."""

    windows: list[_Window]
    steer: Steer
    slot: int


def _steered(steer: Steer, prompt_len: int, rows: _Window) -> list[_Window]:
    """The step's windows of one request that ``steer`` acts on, in order and apart."""
    begin = prompt_len if steer.phase == "decode" else 0
    end = prompt_len if steer.phase == "prefill" else ENDLESS
    if steer.positions == "last":
        begin = max(begin, prompt_len - 1)
    ranges = merged(steer.positions) if isinstance(steer.positions, TokenRanges) else [(0, ENDLESS)]
    clipped = (rows.clip(max(begin, first), min(end, last)) for first, last in ranges)
    return [window for window in clipped if window]


def _entries(requests: list[list[_SteerRun]]) -> SteerEntries:
    """Entries of one layer. Pass p has every request's p-th steering, so that no row occurs twice in a pass."""
    passes = [[runs[p] for runs in requests if p < len(runs)] for p in range(MAX_VECTORS_PER_LAYER)]
    runs = [run for one_pass in passes for run in one_pass]
    lengths = [sum(window.length for window in run.windows) for run in runs]

    def repeated(values: list[Any], dtype: Any) -> Any:
        return np.repeat(np.asarray(values, dtype=dtype), lengths)

    ends = np.cumsum([sum(w.length for run in one_pass for w in run.windows) for one_pass in passes])
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
    """Windows to gather, by layer, in the order in which the layer's tap will hold them."""

    def __init__(self) -> None:
        self.by_layer: dict[int, list[_Window]] = defaultdict(list)
        self._lengths: dict[int, int] = defaultdict(int)

    def fits(self, layer: int, window: _Window, tap: GatherTap) -> bool:
        return self._lengths[layer] + window.length <= tap.capacity

    def add(self, layer: int, window: _Window) -> int:
        """Append; returns where in the layer's tap the window will start."""
        slot = self._lengths[layer]
        self.by_layer[layer].append(window)
        self._lengths[layer] += window.length
        return slot


@dataclass
class _Gathered:
    hidden: _Runs = field(default_factory=_Runs)
    query: _Runs = field(default_factory=_Runs)
    key: _Runs = field(default_factory=_Runs)


def _rows_of(windows: Iterable[_Window]) -> IntArray:
    return np.concatenate([np.arange(w.row, w.row + w.length, dtype=np.int64) for w in windows])
