"""What a request does at every step of its answer, from one edge of what it asked for to the next.

Made once, so that a step of a busy engine, whose batch is never that of the step before, costs little for each of
hundreds of requests: the front end is told the plan once, and the words of the entries are only moved to their places.
Knows no batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import structs

from guard.mia.control import Words
from guard.mia.ops import GATHER_WORDS, STEER_PASS_WORDS
from guard.mia.plan import Base, RequestPlan, SteerChunk
from guard.mia.tracking import Tracked

TAP, DOSE = 0, STEER_PASS_WORDS
"""Columns of ``Standing.passes``: the steering tap, and the dose behind it as the last word of a pass."""


@dataclass
class Standing:
    """``plan`` counts tokens, slots and doses from the request's own first ones in a step. ``until``: the first token
    that it does not hold for. ``layers``: of each slot. ``sent``: whether slots leave the device; ``probed``: whether
    probes read any. passes: ``[n, 1 + STEER_PASS_WORDS]`` int32, a tap's number and the words of a pass. ``told_in``:
    the last layout with it.
    """

    tracked: Tracked
    plan: RequestPlan
    until: int
    layers: tuple[int, ...]
    sent: bool
    probed: bool
    passes: Words
    told_in: int = 0


def standing_plan(one: RequestPlan, position: int) -> tuple[RequestPlan, tuple[int, ...]]:
    """A plan for the one token at ``position``, counted from the request's own; and the layer of each slot."""
    slots = sorted({(slot, layer) for chunk in one.rows for layer, slot in chunk.slots.items()})
    first = slots[0][0] if slots else 0
    rows = [
        structs.replace(
            chunk,
            slots={layer: slot - first for layer, slot in chunk.slots.items()},
            start=chunk.start - position,
        )
        for chunk in one.rows
    ]
    dose = one.steer[0].begin if one.steer else 0
    steer = [SteerChunk(run.index, run.begin - dose, run.fresh - dose, run.end - dose) for run in one.steer]
    return RequestPlan(rows=rows, steer=steer), tuple(layer for _, layer in slots)


@dataclass(frozen=True)
class Placed:
    """Requests of one step that do what they did in the step before. rows: ``[n]`` int32, each one's row; tokens: of
    each; slots, doses: ``[n]``, the first of each."""

    standing: Sequence[Standing]
    rows: npt.NDArray[np.int32]
    tokens: Sequence[int]
    slots: npt.NDArray[np.int32]
    doses: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls, standing: Sequence[Standing], rows: npt.NDArray[np.int32], tokens: Sequence[int], slot: int, dose: int
    ) -> Placed:
        """One behind the other, from a slot and a dose on."""
        return cls(
            standing,
            rows,
            tokens,
            _behind(slot, (len(one.layers) for one in standing)),
            _behind(dose, (len(one.passes) for one in standing)),
        )

    def bases(self) -> Iterator[Base]:
        return map(Base, self.tokens, self.slots.tolist(), self.doses.tolist())

    def gathered(self) -> Iterator[tuple[int, Words]]:
        """Layers, each perhaps several times, and entries for their taps."""
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, one in enumerate(self.standing):
            alike[one.layers].append(i)
        for layers, members in alike.items():
            rows, slots = self.rows[members], self.slots[members]
            for number, layer in enumerate(layers):
                entries = np.empty((len(members), GATHER_WORDS), np.int32)
                entries[:, 0], entries[:, 1] = rows, slots + number
                yield layer, entries

    def sent(self) -> tuple[int, int] | None:
        """The slots from the first to the last that leave the device."""
        members = [i for i, one in enumerate(self.standing) if one.sent]
        if not members:
            return None
        last = members[-1]
        return int(self.slots[members[0]]), int(self.slots[last]) + len(self.standing[last].layers)

    def steered(self) -> Iterator[tuple[int, Words, Words]]:
        """Taps, the row of each pass, and the passes, those of a row in the order in which it was asked for them."""
        counts = [len(one.passes) for one in self.standing]
        if not any(counts):
            return
        passes = np.concatenate([one.passes for one in self.standing])
        passes[:, DOSE] = np.arange(len(passes), dtype=np.int32) + self.doses[0]
        rows = np.repeat(self.rows, counts)
        for tap in np.unique(passes[:, TAP]).tolist():
            mine = passes[:, TAP] == tap
            yield tap, rows[mine], passes[mine, 1:]


def _behind(first: int, lengths: Iterable[int]) -> npt.NDArray[np.int32]:
    """Where each begins when one lies behind the other."""
    ends = np.cumsum(np.fromiter(lengths, np.int32), dtype=np.int32)
    starts: npt.NDArray[np.int32] = np.concatenate([np.zeros(1, np.int32), ends[:-1]]) + np.int32(first)
    return starts
