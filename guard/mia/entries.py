"""One step's entries while they are collected: who gets which slot, and the words that say so.

Owns how windows of requests become entries of the taps. What each request wants is ``routing``'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from guard.mia.buffers import TapBuffers
from guard.mia.control import Control, Words, bits
from guard.mia.ops import ADD, PROJECT, REPLACE, SHUT, STEER_PASS_WORDS
from guard.mia.spec import Steer
from guard.mia.standing import Placed, Standing
from guard.mia.windows import Window

MODES = {"add_vector": ADD, "project": PROJECT, "ablate": PROJECT, "replace": REPLACE}


class SteerRun(NamedTuple):
    """One steering of one request in this step, on ``length`` tokens. ``seen``: those below it were computed before."""

    windows: list[Window]
    length: int
    steer: Steer
    vector: int
    gate: int
    seen: int


class SlotPool:
    """Slots of a pool that several layers' taps share, handed out in order. The same window of a layer is gathered
    once, however many captures read it. ``per_token``: slots that a token takes, by layer."""

    def __init__(self, capacity: int, per_token: dict[int, int]) -> None:
        self._capacity = capacity
        self._per_token = per_token
        self._slots: dict[tuple[int, Window], int] = {}
        self.used = 0
        self.sent = (0, 0)
        self.by_layer: dict[int, list[tuple[Window, int]]] = defaultdict(list)

    def take(self, slots: int) -> bool:
        """Leave so many to somebody else; False when there are not so many."""
        if self.used + slots > self._capacity:
            return False
        self.used += slots
        return True

    def place(self, layers: list[int], window: Window, *, sent: bool = False) -> dict[int, int] | None:
        """Where the window will start, by layer; None when it does not fit. ``sent``: its slots leave the device."""
        known, length = self._slots, window.length
        new = [layer for layer in layers if (layer, window) not in known]
        if self.used + length * sum(map(self._per_token.__getitem__, new)) > self._capacity:
            return None
        for layer in new:
            known[layer, window] = self.used
            self.by_layer[layer].append((window, self.used))
            self.used += length * self._per_token[layer]
        slots = {layer: known[layer, window] for layer in layers}
        if sent:
            self.send(min(slots.values()), max(slots.values()) + length)
        return slots

    def send(self, first: int, last: int) -> None:
        """These slots leave the device, too."""
        self.sent = (min(self.sent[0], first), max(self.sent[1], last)) if self.sent[1] else (first, last)


class KeyRows:
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


class Filling:
    """One step's entries while they are collected."""

    def __init__(self, buffers: TapBuffers) -> None:
        self._buffers = buffers
        self.hidden = SlotPool(len(buffers.hidden_pool), dict.fromkeys(buffers.hidden, 1))
        heads = {layer: len(tap.heads) for layer, tap in buffers.query.items()}
        self.queries = SlotPool(len(buffers.query_pool), heads)
        self.keys = {layer: KeyRows() for layer in buffers.key}
        self._steered: dict[int, list[tuple[SteerRun, int]]] = defaultdict(list)
        self._gathered: dict[int, list[Words]] = defaultdict(list)
        self._passes: dict[int, list[tuple[Words, Words]]] = defaultdict(list)
        self.doses = 0

    def stand(self, standing: Sequence[Standing], rows: npt.NDArray[np.int32], tokens: Sequence[int]) -> Placed | None:
        """Everything of requests that do what they did in the step before; None when it does not fit."""
        first_slot, first_dose = self.hidden.used, self.doses
        if not self.hidden.take(sum(len(one.layers) for one in standing)):
            return None
        self.doses += sum(len(one.passes) for one in standing)
        placed = Placed.of(standing, rows, tokens, first_slot, first_dose)
        for layer, entries in placed.gathered():
            self._gathered[layer].append(entries)
        if (sent := placed.sent()) is not None:
            self.hidden.send(*sent)
        for tap, steered, passes in placed.steered():
            self._passes[tap].append((steered, passes))
        return placed

    def steer(self, run: SteerRun) -> int:
        """Returns the first of the run's doses."""
        begin = self.doses
        self._steered[run.steer.layer].append((run, begin))
        self.doses += run.length
        return begin

    def send(self) -> int:
        """Put everything into the control block and send it; returns how many hidden slots there are."""
        control = self._buffers.control
        control.begin()
        for layer in {**self.hidden.by_layer, **self._gathered}:
            entries = self._gathered[layer]
            if windows := self.hidden.by_layer[layer]:
                entries.append(_gather_entries(windows))
            control.put(self._buffers.hidden[layer].number, np.concatenate(entries))
        for layer, placed in self.queries.by_layer.items():
            tap, shape = self._buffers.query[layer], self._buffers.attention_shapes[layer]
            control.put(tap.number, _gather_entries(placed, tap.heads, shape.query_heads))
        for layer, keys in self.keys.items():
            if keys.windows:
                control.put(self._buffers.key[layer].number, _gather_entries(keys.windows))
        for layer, runs in self._steered.items():
            rows = _counted((window.row, window.length) for run, _ in runs for window in run.windows)
            self._passes[self._buffers.steer[layer]].append((rows, steer_passes(runs)))
        for number, passes in self._passes.items():
            _put_steering(control, number, passes)
        control.upload()
        return self.hidden.used


def _counted(runs: Iterable[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """The numbers from each start on, as many as each length says."""
    starts, lengths = np.array(list(runs), np.int32).T
    ends = np.cumsum(lengths, dtype=np.int32)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1], dtype=np.int32)


def _gather_entries(placed: list[tuple[Window, int]], heads: tuple[int, ...] = (0,), of: int = 1) -> Words:
    """Rows and the slots that they are copied to: of a source that has ``of`` heads for each token, these ``heads``."""
    if len(placed) == 1 and placed[0][0].length == 1:
        # The last token of one prompt, which waits for its first token: numpy's calls take five times as long.
        ((window, first),) = placed
        return np.array([(window.row * of + head, first + i) for i, head in enumerate(heads)], np.int32)
    tokens = _counted((window.row, window.length) for window, _ in placed)
    slots = _counted((slot, window.length * len(heads)) for window, slot in placed)
    rows = tokens[:, None] * of + np.asarray(heads, np.int32)
    return np.stack([rows.reshape(-1), slots], axis=1)


def _put_steering(control: Control, tap: int, parts: list[tuple[Words, Words]]) -> None:
    """One entry for each row, and its passes in the order in which they come. parts: rows, and the pass of each."""
    rows = np.concatenate([rows for rows, _ in parts])
    order = np.argsort(rows, kind="stable")
    begin = control.append(np.concatenate([passes for _, passes in parts])[order])
    unique, first, count = np.unique(rows[order], return_index=True, return_counts=True)
    control.put(tap, np.stack([unique, begin + STEER_PASS_WORDS * first, count], axis=1).astype(np.int32))


def steer_passes(runs: Sequence[tuple[SteerRun, int]]) -> Words:
    """``[tokens of all runs, words of a pass]``, each run with its first dose. Nothing is made for each run
    alone: there may be hundreds."""
    lengths = [run.length for run, _ in runs]
    steers = [run.steer for run, _ in runs]
    out = np.empty((sum(lengths), STEER_PASS_WORDS), np.int32)

    def per_run(values: Iterable[int]) -> Words:
        return np.repeat(np.array(list(values), np.int32), lengths)

    def floats_per_run(values: Iterable[float]) -> Words:
        return np.repeat(bits(np.array(list(values), np.float32)), lengths)

    out[:, 0] = per_run(run.vector for run, _ in runs)
    out[:, 1] = per_run(MODES[steer.method] for steer in steers)
    out[:, 2] = floats_per_run(steer.coefficient for steer in steers)
    out[:, 3] = floats_per_run(steer.target or 0.0 for steer in steers)
    out[:, 4] = per_run(steer.preserve_norm for steer in steers)
    out[:, 5] = per_run(run.gate for run, _ in runs)
    tokens = _counted((window.start, window.length) for run, _ in runs for window in run.windows)
    # New tokens come after whatever has opened a gate; old ones have to look.
    out[:, 6] = np.where(tokens < per_run(run.seen for run, _ in runs), tokens, SHUT - 1)
    out[:, 7] = _counted((dose, run.length) for run, dose in runs)
    return out
