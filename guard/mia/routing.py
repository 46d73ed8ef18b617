"""The scheduler: what the requests asked and one step's batch become entries of the control block.

Owns the requests that asked for something and the host memory that they may take, and writes the control block before
each step. While a batch only decodes, and nobody comes, goes or crosses an edge of what it asked for, the entries of
the step before stay, and a step costs a few comparisons. Never touches vLLM: a runner hands it a ``BatchView`` a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from guard.mia.buffers import TapBuffers
from guard.mia.entries import Filling, SteerRun, steer_passes
from guard.mia.judging import gates_on_masses, gates_on_probes, mass_entries, span_words
from guard.mia.ops import NO_GATE, SHUT, STEER_PASS_WORDS
from guard.mia.plan import Base, BatchView, KeyChunk, RequestPlan, RowChunk, SteerChunk, StepLayout, StepPlan
from guard.mia.probes import ProbeBank
from guard.mia.sharding import ALONE, HeadShard
from guard.mia.spec import AttentionCapture, Capture, HiddenCapture, MiaSpec, ProbeCapture, QKCapture, generates
from guard.mia.standing import Standing, standing_plan
from guard.mia.steering import Bank
from guard.mia.tracking import KEY_BLOCK_TOKENS, KeyStore, Tracked
from guard.mia.windows import Window

NO_HIDDEN_ROWS = "no space for these rows in one step (max_hidden_rows_per_step)"
NO_QUERY_ROWS = "no space for these queries in one step (max_query_rows_per_step)"
NO_MEMORY = "no space for what is gathered of this request (max_host_bytes)"
NO_GATES = "no space for one more gate"
CACHED = "part of the prompt came from the prefix cache"


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
        self.plan = replace(self.plan, offset=self.plan.offset + 1)
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
        self._layouts = 0
        self._standing: dict[str, Standing] = {}
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
        for place in tracked.gates.values():
            # One by one: a list of places would have to get to the device first.
            self._buffers.opened_at[place] = SHUT
        self.requests[request_id] = tracked

    def remove(self, request_id: str) -> None:
        tracked = self.requests.pop(request_id, None)
        if tracked is not None:
            self._standing.pop(request_id, None)
            self._leave_steady()
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
            # A mean is added up in float64, whatever it is of.
            return (8 if capture.average else 4 * rows) * self._buffers.hidden_pool.shape[1]
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
            if not tracked.needs_keys_until:
                self._release_keys(tracked)
        self._prompts_read = []
        standing, others = self._asking(batch)
        if not (standing or others):
            self._buffers.control.clear()
            return None
        plan, filling = StepPlan(StepLayout(0, {})), Filling(self._buffers)
        placed = self._stand(batch, standing, filling) if standing else {}
        if not placed:
            # They may find no room all together, and then each is told so by itself.
            others += [(i, one.tracked) for i, one in standing]
            standing = []
        routed = {batch.request_ids[i]: self._route(batch, i, tracked, filling, plan) for i, tracked in others}
        self._finish(plan, routed, placed, filling)
        self._steady = self._steady_from(batch, [i for i, _ in (*others, *standing)], plan)
        return plan

    def _asking(self, batch: BatchView) -> tuple[list[tuple[int, Standing]], list[tuple[int, Tracked]]]:
        """Places in the batch of requests that this step does anything for: of those that do what they did in the step
        before, and of the others. Most that are guarded are read at their prompt's end and cost nothing after it."""
        standing: list[tuple[int, Standing]] = []
        others: list[tuple[int, Tracked]] = []
        if not self.requests:
            return standing, others
        starts, computed = batch.starts.tolist(), batch.computed.tolist()
        for i, request_id in enumerate(batch.request_ids):
            token = computed[i]
            if (one := self._standing.get(request_id)) is not None:
                if token == one.tracked.seen and token < one.until and starts[i + 1] - starts[i] == 1:
                    standing.append((i, one))
                    continue
                del self._standing[request_id]
            # Where the step begins counts, and not what was seen: after a preemption the same tokens are steered again.
            if (tracked := self.requests.get(request_id)) is not None and not tracked.is_over(token):
                others.append((i, tracked))
        return standing, others

    def _stand(
        self, batch: BatchView, standing: list[tuple[int, Standing]], filling: Filling
    ) -> dict[str, tuple[Standing, Base]]:
        """Place those that do what they did in the step before: where each one's tokens, slots and doses are. Empty
        when there is no room."""
        places, ones = [i for i, _ in standing], [one for _, one in standing]
        placed = filling.stand(ones, batch.starts[places], [one.tracked.seen for one in ones])
        if placed is None:
            return {}
        for one in ones:
            one.tracked.seen += 1
        names = (batch.request_ids[i] for i in places)
        return dict(zip(names, zip(ones, placed.bases(), strict=True), strict=True))

    def clear(self) -> None:
        """A forward pass without requests follows: no entry of the last step may act in it."""
        self._leave_steady()
        self._buffers.control.clear()

    def _finish(
        self,
        plan: StepPlan,
        routed: dict[str, RequestPlan],
        placed: dict[str, tuple[Standing, Base]],
        filling: Filling,
    ) -> None:
        """Send the entries, and say where everything will lie."""
        slots = filling.send()
        plans, bases, known = dict(routed), {}, []
        probed = any(chunk.columns[1] for one in routed.values() for chunk in one.rows)
        for request_id, (standing, base) in placed.items():
            plans[request_id], bases[request_id] = standing.plan, base
            if standing.told_in == self._layouts:
                known.append(request_id)
            standing.told_in = self._layouts + 1
            probed = probed or standing.probed
        self._layouts += 1
        plan.layout = StepLayout(
            self._layouts,
            plans,
            bases,
            frozenset(known),
            sent=filling.hidden.sent,
            logits=slots * self._probes.outputs if probed else 0,
            outputs=self._probes.outputs,
            dose_limit=self._dose_limit,
        )
        plan.doses = filling.doses
        plan.gated = any(one.gates for one in routed.values())
        for request_id, one in routed.items():
            with_heads = self.requests[request_id].with_heads
            plan.head_chunks += [(request_id, chunk) for chunk in one.rows if chunk.capture in with_heads]
        for entries in plan.mass_entries:
            entries[:, 7] += plan.layout.logits
        plan.gate_entries = [(*entry[:2], entry[2] + plan.layout.logits, *entry[3:]) for entry in plan.gate_entries]
        for request_id, one in routed.items():
            plan.gate_entries.extend(gates_on_probes(self._probes, self.requests[request_id], one))
        plan.values = bool(probed or plan.head_chunks or plan.gate_entries)

    def _route(self, batch: BatchView, i: int, tracked: Tracked, filling: Filling, plan: StepPlan) -> RequestPlan:
        rows = Window(int(batch.starts[i]), int(batch.computed[i]), int(batch.starts[i + 1] - batch.starts[i]))
        before = set(tracked.failed)
        one = RequestPlan(gates=tracked.gates, shut=tracked.shut)
        one.block_row = int(batch.block_rows[i]) if len(batch.block_rows) else 0
        one.prompt_ended = tracked.seen < tracked.prompt_len <= rows.end
        one.again = rows.start < tracked.seen
        if tracked.captures:
            self._route_keys(tracked, rows, filling, plan)
            self._route_rows(tracked, rows, filling, plan, one)
        runs = self._route_steering(tracked, rows, filling, one)
        if one.prompt_ended:
            self._prompts_read.append(tracked)
        if len(tracked.failed) > len(before) or tracked.seen == 0:
            one.failed = dict(tracked.failed)
        tracked.seen = max(tracked.seen, rows.end)
        alone = rows.length > 1 or one.failed or one.gates or one.shut
        if not alone and (until := self._alike_until(tracked, rows.start, one)) > rows.end:
            self._standing[batch.request_ids[i]] = self._standing_from(tracked, one, rows.start, until, runs)
        return one

    def _alike_until(self, tracked: Tracked, position: int, one: RequestPlan) -> int:
        """The first token of an answer that needs other entries than the one at ``position``; 0 where the next does."""
        if one.again or position < max(tracked.prompt_len, tracked.needs_keys_until):
            return 0
        return tracked.next_edge(position + 1)

    def _standing_from(
        self, tracked: Tracked, one: RequestPlan, position: int, until: int, runs: list[SteerRun]
    ) -> Standing:
        plan, layers = standing_plan(one, position)
        passes = np.zeros((len(runs), 1 + STEER_PASS_WORDS), np.int32)
        if runs:
            passes[:, 0] = [self._buffers.steer[run.steer.layer] for run in runs]
            passes[:, 1:] = steer_passes([(run, 0) for run in runs])
        probed = [bool(chunk.columns[1]) for chunk in plan.rows]
        return Standing(tracked, plan, until, layers, sent=not all(probed), probed=any(probed), passes=passes)

    def _route_keys(self, tracked: Tracked, rows: Window, filling: Filling, plan: StepPlan) -> None:
        store = tracked.keys
        if store is None or rows.start >= max(tracked.prompt_len, tracked.needs_keys_until):
            return
        if rows.start < tracked.needs_keys_until and rows.end > store.room and not self._grow(tracked, store, rows.end):
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

    def _route_rows(self, tracked: Tracked, rows: Window, filling: Filling, plan: StepPlan, one: RequestPlan) -> None:
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

    def _place(self, capture: Capture, wanted: Window, filling: Filling) -> dict[int, int] | None:
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
            return [structs.replace(chunk, columns=(columns.start, columns.stop)) for chunk in chunks]
        if isinstance(capture, AttentionCapture):
            placed = []
            for chunk in chunks:
                placed.append(structs.replace(chunk, mass=plan.masses))
                if capture.spans and not self.gathers_keys:
                    spans = len(plan.span_words)
                    plan.span_words += span_words(tracked.spec, capture)
                    entries = mass_entries(self._buffers, self._shard, capture, placed[-1], one.block_row, spans)
                    plan.mass_entries.append(entries)
                plan.masses += chunk.length * len(capture.heads) * len(capture.spans)
            plan.gate_entries.extend(gates_on_masses(tracked, capture, name, placed, one, rows.end))
            return placed
        if isinstance(capture, QKCapture):
            sent, until = tracked.sent_keys.get(name, 0), rows.end if generates(capture) else tracked.prompt_len
            until = min(until, rows.end)
            if until > sent:
                tracked.sent_keys[name] = until
                last = chunks.pop() if chunks else RowChunk(name, {}, rows.end, 0)
                return [*chunks, structs.replace(last, keys=(sent, until), keys_from=rows.start)]
        return chunks

    def _route_steering(self, tracked: Tracked, rows: Window, filling: Filling, one: RequestPlan) -> list[SteerRun]:
        """What one request's steering does in this step, in the order in which it asked."""
        runs = []
        for i, steer in enumerate(tracked.spec.steer):
            if i in tracked.shut:
                continue
            if windows := [window for ends in tracked.reaches[i] if (window := rows.clip(*ends))]:
                length = sum(window.length for window in windows)
                gate = tracked.gates.get(i, NO_GATE)
                run = SteerRun(windows, length, steer, self._bank.slot(steer.vector), gate, tracked.seen)
                runs.append(run)
                begin = filling.steer(run)
                again = tracked.seen > rows.start
                old = sum(window.clip(0, tracked.seen).length for window in windows) if again else 0
                one.steer.append(SteerChunk(i, begin, begin + old, begin + length))
        return runs

    def _steady_from(self, batch: BatchView, places: list[int], plan: StepPlan) -> _Steady | None:
        """Whether the next steps can do with the entries of this one, and how many of them."""
        asking = np.asarray(places)
        decodes = (batch.starts[asking + 1] - batch.starts[asking] == 1).all()
        if not decodes or not batch.samples[asking].all():
            return None
        steps = min(self._steps_alike(batch.request_ids[i], int(batch.computed[i]), plan) for i in places)
        if steps <= 0:
            return None
        computed = batch.computed[asking].copy()
        return _Steady(list(batch.request_ids), batch.starts.copy(), asking, computed, steps, plan)

    def _steps_alike(self, request_id: str, position: int, plan: StepPlan) -> int:
        """For how many further tokens the entries of the one at ``position`` will do."""
        until = self._alike_until(self.requests[request_id], position, plan.layout.requests[request_id])
        return until - (position + 1)

    def _leave_steady(self) -> None:
        if self._steady is not None:
            for i, computed in zip(self._steady.asking, self._steady.computed, strict=True):
                if (tracked := self.requests.get(self._steady.request_ids[i])) is not None:
                    tracked.seen = max(tracked.seen, int(computed) + 1)
            self._steady = None
