"""The scheduler: what the requests asked and one step's batch become entries of the control block.

Owns the requests that asked for something and the host memory that they may take, and writes the control block before
each step. While a batch only decodes, and nobody comes, goes or crosses an edge of what it asked for, the entries of
the step before stay, and a step costs a few comparisons. Never touches vLLM: a runner hands it a ``BatchView`` a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from guard.mia.buffers import TapBuffers
from guard.mia.control import Control, Words, bits
from guard.mia.ops import ADD, FIRST_PART, LAST_PART, NO_GATE, PROJECT, REPLACE, SHUT, STEER_PASS_WORDS
from guard.mia.probes import ProbeBank
from guard.mia.results import is_averaged
from guard.mia.sharding import ALONE, HeadShard
from guard.mia.spec import (
    AttentionCapture,
    Capture,
    Gate,
    HiddenCapture,
    MiaSpec,
    ProbeCapture,
    QKCapture,
    Steer,
    TokenRanges,
    generates,
)
from guard.mia.steering import Bank
from guard.mia.tracking import KEY_BLOCK_TOKENS, KeyStore, Tracked
from guard.mia.windows import Window, merged, steered

NO_HIDDEN_ROWS = "no space for these rows in one step (max_hidden_rows_per_step)"
NO_QUERY_ROWS = "no space for these queries in one step (max_query_rows_per_step)"
NO_MEMORY = "no space for what is gathered of this request (max_host_bytes)"
NO_GATES = "no space for one more gate"
CACHED = "part of the prompt came from the prefix cache"

MODES = {"add_vector": ADD, "project": PROJECT, "ablate": PROJECT, "replace": REPLACE}


@dataclass(frozen=True)
class BatchView:
    """One step's batch, complete when constructed. Tokens of request i are rows ``starts[i]:starts[i + 1]``.

    starts: ``[requests + 1]`` int32, host. computed: ``[requests]`` int32, host: tokens of each request that earlier
    steps computed, so row ``starts[i] + j`` is the request's token ``computed[i] + j``. samples: ``[requests]`` bool,
    host: whether the step samples a token of the request. block_rows: ``[requests]`` int32, host: each request's row in
    the block tables; empty where keys are not read from vLLM's cache.
    """

    request_ids: list[str]
    starts: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    samples: npt.NDArray[np.bool_]
    block_rows: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True)
class KeyChunk:
    """Rows from ``slots[layer]`` on of each layer's key tap hold the request's tokens ``start:start + length``."""

    store: KeyStore
    slots: dict[int, int]
    start: int
    length: int


@dataclass(frozen=True)
class RowChunk:
    """Slots from ``slots[layer]`` on of a pool hold what a capture reads of the tokens ``start:start + length``.

    Of the query pool for attention and for queries, else of the hidden pool. ``columns``: a probe's among the logits of
    all. ``mass``: where the attention masses ``[length, heads, spans]`` begin, behind the logits. ``keys``: for
    queries, the tokens whose keys come with them; ``length`` may then be 0. ``keys_from``: the step's first token,
    which says what keys a window still shows.
    """

    capture: str
    slots: dict[int, int]
    start: int
    length: int
    columns: tuple[int, int] = (0, 0)
    mass: int = 0
    keys: tuple[int, int] = (0, 0)
    keys_from: int = 0


@dataclass(frozen=True)
class SteerChunk:
    """Doses ``begin:end`` of the step belong to one request's steering ``index``.

    ``fresh``: from which on they are of tokens that no earlier step computed.
    """

    index: int
    begin: int
    fresh: int
    end: int


@dataclass
class RequestPlan:
    """What a step does for one request.

    ``prompt_ended``: its last prompt token is in the step. ``block_row``: its row in the block tables. ``gates``: its
    gates' places in ``opened_at``, by steering. ``failed``: captures that cannot become complete any more, and why;
    ``shut``: the same of steerings whose gate cannot open.
    """

    rows: list[RowChunk] = field(default_factory=list)
    steer: list[SteerChunk] = field(default_factory=list)
    prompt_ended: bool = False
    block_row: int = 0
    gates: dict[int, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    shut: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepLayout:
    """Where what a step reads lies in its record, and whose it is.

    ``added``: requests that no earlier step had, with the length of their prompts. ``offset``: all positions lie so
    many tokens beyond those written here. ``sent``: the hidden pool's slots that leave the device. ``logits``: values
    of probes, ``[slots, outputs of all probes]``; attention masses lie behind them. ``dose_limit``: a larger dose was
    shortened to it.
    """

    requests: dict[str, RequestPlan]
    added: dict[str, tuple[MiaSpec, int]] = field(default_factory=dict)
    offset: int = 0
    sent: tuple[int, int] = (0, 0)
    logits: int = 0
    outputs: int = 0
    dose_limit: float = float("inf")


@dataclass
class StepPlan:
    """What to read after the step. ``head_chunks``: those of attention and queries, with their requests. ``gated``:
    whether any request has gates. ``values``: whether anything is computed from what was gathered. ``masses``: values
    of attention; ``doses``: of steering. mass_entries, gate_entries: ``[n, words of one]``; ``span_words``: what masses
    refer to."""

    layout: StepLayout
    key_chunks: list[KeyChunk] = field(default_factory=list)
    head_chunks: list[tuple[str, RowChunk]] = field(default_factory=list)
    gated: bool = False
    values: bool = False
    masses: int = 0
    doses: int = 0
    mass_entries: list[Words] = field(default_factory=list)
    span_words: list[int] = field(default_factory=list)
    gate_entries: list[tuple[int, ...]] = field(default_factory=list)


@dataclass
class _Steady:
    """A batch that only decodes: while it stays as it is, so do its entries.

    asking: ``[n]``, places in the batch of the requests that asked; computed: ``[n]``, as in the step before.
    """

    request_ids: list[str]
    starts: npt.NDArray[np.int32]
    asking: npt.NDArray[np.intp]
    computed: npt.NDArray[np.int32]
    steps_left: int
    plan: StepPlan

    def goes_on(self, batch: BatchView) -> bool:
        return (
            self.steps_left > 0
            and batch.request_ids == self.request_ids
            and np.array_equal(batch.starts, self.starts)
            and np.array_equal(batch.computed[self.asking], self.computed + 1)
        )

    def advance(self) -> StepPlan:
        self.steps_left -= 1
        self.computed += 1
        layout = replace(self.plan.layout, offset=self.plan.layout.offset + 1, added={})
        self.plan = replace(self.plan, layout=layout)
        return self.plan


class Router:
    """Requests in, entries out."""

    def __init__(
        self,
        buffers: TapBuffers,
        bank: Bank,
        probes: ProbeBank,
        max_host_bytes: int,
        shard: HeadShard = ALONE,
    ) -> None:
        self._buffers = buffers
        self._bank = bank
        self._probes = probes
        self._max_host_bytes = max_host_bytes
        self._shard = shard
        self._dose_limit = float(buffers.dose_limit)
        self._host_bytes = 0
        self._free_gates = list(range(len(buffers.opened_at)))
        self._steady: _Steady | None = None
        self._added: set[str] = set()
        self._prompts_read: list[Tracked] = []
        self.requests: dict[str, Tracked] = {}

    @property
    def gathers_keys(self) -> bool:
        """Whether keys pass taps; else they are read from vLLM's cache."""
        return bool(self._buffers.key)

    @property
    def idle(self) -> bool:
        """Whether a step's batch is of no concern: nobody asks, and nothing is left of those who did."""
        return not self.requests and not self._buffers.control.acts

    def add(self, request_id: str, spec: MiaSpec, prompt_len: int) -> None:
        """Start tracking. A capture that finds no space is tracked all the same and reads ``dropped``."""
        self.remove(request_id)
        tracked = Tracked.start(spec, prompt_len)
        if tracked.with_heads and self.gathers_keys:
            self._reserve_keys(tracked)
        for name, capture in tracked.captures.items():
            if name not in tracked.failed and not self._reserve(tracked, self._prompt_bytes(tracked, name, capture)):
                tracked.failed[name] = NO_MEMORY
        for i, steer in enumerate(spec.steer):
            if steer.gate is not None and self._free_gates:
                tracked.gates[i] = self._free_gates.pop()
            elif steer.gate is not None:
                tracked.shut[i] = NO_GATES
        if tracked.gates:
            self._buffers.opened_at[list(tracked.gates.values())] = SHUT
        self.requests[request_id] = tracked
        self._added.add(request_id)

    def remove(self, request_id: str) -> None:
        tracked = self.requests.pop(request_id, None)
        if tracked is not None:
            self._leave_steady()
            self._added.discard(request_id)
            self._free_gates.extend(tracked.gates.values())
            self._release_rows(tracked)
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
        layers = sorted({n for capture in tracked.with_heads.values() for n, _ in capture.heads})
        shapes = {layer: self._buffers.attention_shapes[layer] for layer in layers}
        length = tracked.prompt_len
        if self._take(sum(4 * length * s.key_heads * s.head_size for s in shapes.values())):
            keys = {layer: torch.empty(length, s.key_heads, s.head_size) for layer, s in shapes.items()}
            tracked.keys = KeyStore(keys)
        else:
            for name in tracked.with_heads:
                tracked.failed[name] = NO_MEMORY

    def _prompt_bytes(self, tracked: Tracked, name: str, capture: Capture) -> int:
        """What a capture's readout of the prompt takes while it is gathered."""
        length = tracked.prompt_len
        rows = sum(min(end, length) - start for start, end in tracked.intervals[name] if start < length)
        if isinstance(capture, HiddenCapture):
            return 4 * rows * self._buffers.hidden_pool.shape[1]
        if isinstance(capture, ProbeCapture):
            return 4 * rows
        if isinstance(capture, QKCapture):
            return 4 * rows * sum(self._buffers.attention_shapes[layer].head_size for layer, _ in capture.heads)
        return 4 * len(capture.heads) * length if capture.weights else 0

    def fill(self, batch: BatchView) -> StepPlan | None:
        """Write this step's entries; None when no request in the batch asks for anything."""
        if self._steady is not None and self._steady.goes_on(batch):
            return self._steady.advance()
        self._leave_steady()
        for tracked in self._prompts_read:
            self._release_rows(tracked)
            if not tracked.needs_keys_to_the_end:
                self._release_keys(tracked)
        self._prompts_read = []
        asking = [(i, id_) for i, id_ in enumerate(batch.request_ids) if id_ in self.requests] if self.requests else []
        if not asking:
            self._buffers.control.clear()
            return None
        plan, filling = StepPlan(StepLayout({})), _Filling(self._buffers)
        requests = {id_: self._route(batch, i, self.requests[id_], filling, plan) for i, id_ in asking}
        self._finish(plan, requests, filling)
        self._steady = self._steady_from(batch, [i for i, _ in asking], plan)
        return plan

    def clear(self) -> None:
        """A forward pass without requests follows: no entry of the last step may act in it."""
        self._leave_steady()
        self._buffers.control.clear()

    def _finish(self, plan: StepPlan, requests: dict[str, RequestPlan], filling: _Filling) -> None:
        """Send the entries, and say where everything will lie."""
        slots = filling.send()
        probed = any(chunk.columns[1] for one in requests.values() for chunk in one.rows)
        added = {
            id_: (self.requests[id_].spec, self.requests[id_].prompt_len) for id_ in requests if id_ in self._added
        }
        self._added -= added.keys()
        plan.layout = StepLayout(
            requests,
            added,
            sent=filling.hidden.sent,
            logits=slots * self._probes.outputs if probed else 0,
            outputs=self._probes.outputs,
            dose_limit=self._dose_limit,
        )
        plan.doses = filling.doses
        plan.gated = any(one.gates for one in requests.values())
        for request_id, one in requests.items():
            with_heads = self.requests[request_id].with_heads
            plan.head_chunks += [(request_id, chunk) for chunk in one.rows if chunk.capture in with_heads]
        for entries in plan.mass_entries:
            entries[:, 7] += plan.layout.logits
        plan.gate_entries = [(*entry[:2], entry[2] + plan.layout.logits, *entry[3:]) for entry in plan.gate_entries]
        for request_id, one in requests.items():
            self._judge_probes(plan, self.requests[request_id], one)
        plan.values = bool(probed or plan.head_chunks or plan.gate_entries)

    def _route(self, batch: BatchView, i: int, tracked: Tracked, filling: _Filling, plan: StepPlan) -> RequestPlan:
        rows = Window(int(batch.starts[i]), int(batch.computed[i]), int(batch.starts[i + 1] - batch.starts[i]))
        before = set(tracked.failed)
        one = RequestPlan(gates=tracked.gates, shut=tracked.shut)
        one.block_row = int(batch.block_rows[i]) if len(batch.block_rows) else 0
        one.prompt_ended = tracked.seen < tracked.prompt_len <= rows.end
        if tracked.captures:
            self._route_keys(tracked, rows, filling, plan)
            self._route_rows(tracked, rows, filling, plan, one)
        if tracked.spec.steer:
            self._route_steering(tracked, rows, filling, one)
        if one.prompt_ended:
            self._prompts_read.append(tracked)
        if len(tracked.failed) > len(before) or tracked.seen == 0:
            one.failed = dict(tracked.failed)
        tracked.seen = max(tracked.seen, rows.end)
        return one

    def _route_keys(self, tracked: Tracked, rows: Window, filling: _Filling, plan: StepPlan) -> None:
        store = tracked.keys
        if store is None:
            return
        if tracked.needs_keys_to_the_end and rows.end > store.room and not self._grow(tracked, store, rows.end):
            return
        wanted = rows.clip(0, store.room)
        if not wanted:
            return
        if wanted.start > store.filled:
            for name in tracked.with_heads:
                tracked.failed.setdefault(name, CACHED)
            return
        slots = {layer: filling.keys[layer].place(wanted) for layer in store.keys}
        plan.key_chunks.append(KeyChunk(store, slots, wanted.start, wanted.length))
        store.filled = max(store.filled, wanted.end)

    def _grow(self, tracked: Tracked, store: KeyStore, tokens: int) -> bool:
        """Room for the keys of ``tokens`` tokens, or the end of the captures that need them."""
        more = -(-(tokens - store.room) // KEY_BLOCK_TOKENS) * KEY_BLOCK_TOKENS
        if self._take(sum(4 * more * keys[0].numel() for keys in store.keys.values())):
            store.grow(more)
            return True
        for name in tracked.with_heads:
            tracked.failed.setdefault(name, NO_MEMORY)
        self._release_keys(tracked)
        return False

    def _route_rows(self, tracked: Tracked, rows: Window, filling: _Filling, plan: StepPlan, one: RequestPlan) -> None:
        for name, capture in tracked.captures.items():
            if name in tracked.failed:
                continue
            read = tracked.intervals[name]
            if read[-1][1] <= rows.start and tracked.seen >= tracked.prompt_len:
                continue
            chunks: list[RowChunk] = []
            for start, end in read:
                if max(start, tracked.seen) < min(end, rows.start):
                    tracked.failed[name] = CACHED
                    break
                if wanted := rows.clip(max(start, tracked.seen), end):
                    slots = self._place(capture, wanted, filling)
                    if slots is None:
                        no_space = (
                            NO_QUERY_ROWS if isinstance(capture, AttentionCapture | QKCapture) else NO_HIDDEN_ROWS
                        )
                        tracked.failed[name] = no_space
                        break
                    chunks.append(RowChunk(name, slots, wanted.start, wanted.length))
            if name not in tracked.failed:
                one.rows += self._completed(tracked, name, capture, chunks, rows, plan, one)

    def _place(self, capture: Capture, wanted: Window, filling: _Filling) -> dict[int, int] | None:
        """Where in a pool the rows of a window will lie, by layer; None when they do not fit."""
        if isinstance(capture, AttentionCapture | QKCapture):
            return filling.queries.place(sorted({layer for layer, _ in capture.heads}), wanted)
        layer = capture.layer if isinstance(capture, HiddenCapture) else self._probes.layers[capture.probe]
        return filling.hidden.place([layer], wanted, sent=isinstance(capture, HiddenCapture))

    def _completed(
        self,
        tracked: Tracked,
        name: str,
        capture: Capture,
        chunks: list[RowChunk],
        rows: Window,
        plan: StepPlan,
        one: RequestPlan,
    ) -> list[RowChunk]:
        """The chunks with what else belongs to them: places for attention masses and the gates that see them, keys."""
        if isinstance(capture, ProbeCapture):
            columns = self._probes.columns[capture.probe]
            return [replace(chunk, columns=(columns.start, columns.stop)) for chunk in chunks]
        if isinstance(capture, AttentionCapture):
            placed = []
            for chunk in chunks:
                placed.append(replace(chunk, mass=plan.masses))
                if not self.gathers_keys:
                    self._plan_masses(tracked, capture, placed[-1], plan, one)
                plan.masses += chunk.length * len(capture.heads) * len(capture.spans)
            self._judge_masses(tracked, name, capture, placed, rows, one, plan)
            return placed
        if isinstance(capture, QKCapture):
            sent, until = tracked.sent_keys.get(name, 0), rows.end if generates(capture) else tracked.prompt_len
            until = min(until, rows.end)
            if until > sent:
                tracked.sent_keys[name] = until
                last = chunks.pop() if chunks else RowChunk(name, {}, rows.end, 0)
                return [*chunks, replace(last, keys=(sent, until), keys_from=rows.start)]
        return chunks

    def _plan_masses(
        self, tracked: Tracked, capture: AttentionCapture, chunk: RowChunk, plan: StepPlan, one: RequestPlan
    ) -> None:
        """Entries for the kernel that reads vLLM's cache."""
        if not capture.spans:
            return
        begin = len(plan.span_words)
        for span in capture.spans:
            ranges = merged(_ranges(tracked.spec, span))
            plan.span_words += [len(ranges), *(edge for pair in ranges for edge in pair)]
        layers = sorted(self._buffers.query)
        steps = np.arange(chunk.length, dtype=np.int32)
        for column, (layer, head) in enumerate(capture.heads):
            shape, tap = self._buffers.attention_shapes[layer], self._buffers.query[layer]
            local = self._shard.query_head(head, shape.query_heads)
            if local is None:
                continue
            entries = np.empty((chunk.length, 8), np.int32)
            entries[:, 0] = chunk.slots[layer] + steps * len(tap.heads) + tap.heads.index(local)
            entries[:, 1:4] = layers.index(layer), local // shape.group, one.block_row
            entries[:, 4] = chunk.start + steps
            entries[:, 5:7] = begin, len(capture.spans)
            entries[:, 7] = chunk.mass + (steps * len(capture.heads) + column) * len(capture.spans)
            plan.mass_entries.append(entries)

    def _judge_masses(
        self,
        tracked: Tracked,
        name: str,
        capture: AttentionCapture,
        chunks: list[RowChunk],
        rows: Window,
        one: RequestPlan,
        plan: StepPlan,
    ) -> None:
        """Entries for the gates on an attention readout; those on probes follow once all slots are placed."""
        heads, spans = len(capture.heads), len(capture.spans)
        averaged = is_averaged(capture)
        total = sum(end - start for start, end in tracked.intervals[name]) if averaged else 0
        for i, gate_slot in tracked.gates.items():
            gate = tracked.spec.steer[i].gate
            assert gate is not None
            if gate.readout != name or gate.span is None:
                continue
            column = capture.spans.index(gate.span)
            parts: Sequence[RowChunk] = chunks
            if averaged and one.prompt_ended and not chunks:
                parts = [RowChunk(name, {}, 0, 0)]
            for k, chunk in enumerate(parts):
                first = FIRST_PART if i not in tracked.judged else 0
                last = LAST_PART if averaged and one.prompt_ended and k == len(parts) - 1 else 0
                plan.gate_entries.append(
                    (
                        gate_slot,
                        max(rows.end, tracked.prompt_len),
                        chunk.mass + column,
                        chunk.length,
                        heads * spans,
                        heads,
                        spans,
                        *_threshold(gate),
                        total,
                        first | last,
                    )
                )
                if averaged:
                    tracked.judged.add(i)

    def _judge_probes(self, plan: StepPlan, tracked: Tracked, one: RequestPlan) -> None:
        """Entries for the gates on probes, once it is known that there are logits."""
        for i, slot in tracked.gates.items():
            gate = tracked.spec.steer[i].gate
            assert gate is not None
            if (capture := tracked.spec.probes.get(gate.readout)) is None:
                continue
            layer, column = self._probes.layers[capture.probe], self._probes.columns[capture.probe].start
            for chunk in one.rows:
                if chunk.capture == gate.readout:
                    first = chunk.slots[layer] * self._probes.outputs + column
                    opens_from = max(tracked.seen, tracked.prompt_len)
                    shape = (first, chunk.length, self._probes.outputs, 1, 1)
                    plan.gate_entries.append((slot, opens_from, *shape, *_threshold(gate), 0, 0))

    def _route_steering(self, tracked: Tracked, rows: Window, filling: _Filling, one: RequestPlan) -> None:
        """What one request's steering does in this step, in the order in which it asked."""
        for i, steer in enumerate(tracked.spec.steer):
            # Zero changes nothing, and leaving it out keeps the stream bit for bit.
            if steer.coefficient == 0.0 or i in tracked.shut:
                continue
            if windows := steered(steer, tracked.prompt_len, tracked.prompt_len, rows):
                run = _SteerRun(
                    windows, steer, self._bank.slot(steer.vector), tracked.gates.get(i, NO_GATE), tracked.seen
                )
                begin = filling.steer(run)
                old = sum(window.clip(0, tracked.seen).length for window in windows)
                one.steer.append(SteerChunk(i, begin, begin + old, begin + run.length))

    def _steady_from(self, batch: BatchView, places: list[int], plan: StepPlan) -> _Steady | None:
        """Whether the next steps can do with the entries of this one, and how many of them."""
        asking = np.asarray(places)
        steps = int(min(self._steps_alike(self.requests[batch.request_ids[i]], int(batch.computed[i])) for i in places))
        decodes = (batch.starts[asking + 1] - batch.starts[asking] == 1).all()
        if steps <= 0 or not decodes or not batch.samples[asking].all():
            return None
        computed = batch.computed[asking].copy()
        return _Steady(list(batch.request_ids), batch.starts.copy(), asking, computed, steps, plan)

    def _steps_alike(self, tracked: Tracked, position: int) -> int:
        """For how many further tokens the entries of the one at ``position`` will do."""
        moves = any(generates(capture) for capture in tracked.with_heads.values())
        if position < tracked.prompt_len or position + 1 < tracked.seen or moves:
            return 0
        return tracked.next_edge(position + 1) - (position + 1)

    def _leave_steady(self) -> None:
        if self._steady is not None:
            for i, computed in zip(self._steady.asking, self._steady.computed, strict=True):
                if (tracked := self.requests.get(self._steady.request_ids[i])) is not None:
                    tracked.seen = max(tracked.seen, int(computed) + 1)
            self._steady = None


def _ranges(spec: MiaSpec, span: str) -> TokenRanges:
    ranges = spec.spans[span]
    assert isinstance(ranges, TokenRanges)
    return ranges


def _threshold(gate: Gate) -> tuple[int, int]:
    """A gate's threshold by its bits, and whether the gate opens above it."""
    threshold = gate.above if gate.above is not None else gate.below
    return int(bits(np.asarray([threshold], np.float32))[0]), int(gate.above is not None)


@dataclass(frozen=True)
class _SteerRun:
    """One steering of one request in this step. ``seen``: its tokens below this one were computed before."""

    windows: list[Window]
    steer: Steer
    vector: int
    gate: int
    seen: int

    @property
    def length(self) -> int:
        return sum(window.length for window in self.windows)

    def passes(self, dose: int) -> Words:
        """``[length, words of a pass]``. New tokens come after whatever has opened a gate; old ones have to look."""
        out = np.empty((self.length, STEER_PASS_WORDS), np.int32)
        steer = self.steer
        scales = bits(np.asarray([steer.coefficient, steer.target or 0.0], np.float32))
        out[:, :6] = self.vector, MODES[steer.method], *scales, steer.preserve_norm, self.gate
        tokens = _counted((window.start, window.length) for window in self.windows)
        out[:, 6] = np.where(tokens < self.seen, tokens, SHUT - 1)
        out[:, 7] = np.arange(dose, dose + self.length)
        return out


class _Pool:
    """Slots of a pool that several layers' taps share, handed out in order. The same window of a layer is gathered
    once, however many captures read it. ``per_token``: slots that a token takes, by layer."""

    def __init__(self, capacity: int, per_token: dict[int, int]) -> None:
        self._capacity = capacity
        self._per_token = per_token
        self._slots: dict[tuple[int, Window], int] = {}
        self.used = 0
        self.sent = (0, 0)
        self.by_layer: dict[int, list[tuple[Window, int]]] = defaultdict(list)

    def place(self, layers: list[int], window: Window, *, sent: bool = False) -> dict[int, int] | None:
        """Where the window will start, by layer; None when it does not fit. ``sent``: its slots leave the device."""
        new = [layer for layer in layers if (layer, window) not in self._slots]
        if self.used + sum(window.length * self._per_token[layer] for layer in new) > self._capacity:
            return None
        for layer in new:
            self._slots[layer, window] = self.used
            self.by_layer[layer].append((window, self.used))
            self.used += window.length * self._per_token[layer]
        slots = {layer: self._slots[layer, window] for layer in layers}
        if sent:
            first, last = min(slots.values()), max(slots.values()) + window.length
            self.sent = (min(self.sent[0], first), max(self.sent[1], last)) if self.sent[1] else (first, last)
        return slots


class _Keys:
    """The rows of one layer's key tap."""

    def __init__(self) -> None:
        self._slots: dict[Window, int] = {}
        self.windows: list[tuple[Window, int]] = []
        self._used = 0

    def place(self, window: Window) -> int:
        if window not in self._slots:
            self._slots[window] = self._used
            self.windows.append((window, self._used))
            self._used += window.length
        return self._slots[window]


class _Filling:
    """One step's entries while they are collected."""

    def __init__(self, buffers: TapBuffers) -> None:
        self._buffers = buffers
        self.hidden = _Pool(len(buffers.hidden_pool), dict.fromkeys(buffers.hidden, 1))
        heads = {layer: len(tap.heads) for layer, tap in buffers.query.items()}
        self.queries = _Pool(len(buffers.query_pool), heads)
        self.keys = {layer: _Keys() for layer in buffers.key}
        self._steered: dict[int, list[tuple[_SteerRun, int]]] = defaultdict(list)
        self.doses = 0

    def steer(self, run: _SteerRun) -> int:
        """Returns the first of the run's doses."""
        begin = self.doses
        self._steered[run.steer.layer].append((run, begin))
        self.doses += run.length
        return begin

    def send(self) -> int:
        """Put everything into the control block and send it; returns how many hidden slots there are."""
        control = self._buffers.control
        control.begin()
        for layer, placed in self.hidden.by_layer.items():
            control.put(self._buffers.hidden[layer].number, _gather_entries(placed))
        for layer, placed in self.queries.by_layer.items():
            tap, shape = self._buffers.query[layer], self._buffers.attention_shapes[layer]
            control.put(tap.number, _gather_entries(placed, tap.heads, shape.query_heads))
        for layer, keys in self.keys.items():
            if keys.windows:
                control.put(self._buffers.key[layer].number, _gather_entries(keys.windows))
        for layer, runs in self._steered.items():
            _put_steering(control, self._buffers.steer[layer], runs)
        control.upload()
        return self.hidden.used


def _counted(runs: Iterable[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """The numbers from each start on, as many as each length says."""
    return np.concatenate([np.arange(start, start + length, dtype=np.int32) for start, length in runs])


def _gather_entries(placed: list[tuple[Window, int]], heads: tuple[int, ...] = (0,), of: int = 1) -> Words:
    """Rows and the slots that they are copied to: of a source that has ``of`` heads for each token, these ``heads``."""
    tokens = _counted((window.row, window.length) for window, _ in placed)
    slots = _counted((slot, window.length * len(heads)) for window, slot in placed)
    rows = tokens[:, None] * of + np.asarray(heads, np.int32)
    return np.stack([rows.reshape(-1), slots], axis=1)


def _put_steering(control: Control, tap: int, runs: list[tuple[_SteerRun, int]]) -> None:
    """One entry for each row, and its passes in the order of the request's steerings, which is that of ``runs``."""
    rows = np.concatenate([_counted((w.row, w.length) for w in run.windows) for run, _ in runs])
    passes = np.concatenate([run.passes(dose) for run, dose in runs])
    order = np.argsort(rows, kind="stable")
    begin = control.append(passes[order])
    unique, first, count = np.unique(rows[order], return_index=True, return_counts=True)
    control.put(tap, np.stack([unique, begin + STEER_PASS_WORDS * first, count], axis=1).astype(np.int32))
