"""Records of steps become the readouts of requests.

Owns what was read and not yet delivered, the formulas over several steps (means, reports), and when rows are taken out
of the worker's ring. A step's record is at first only kept, so that a step costs the same however many requests it
reads. Lives in the front end, where it keeps no engine waiting; never touches vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import numpy as np

from guard.mia.growing import GrowingRows, RowSum
from guard.mia.ops import HELD_BACK, SHUT
from guard.mia.plan import Base, RequestPlan, RowChunk, SteerChunk, StepLayout
from guard.mia.record import StepRecord
from guard.mia.results import (
    AttentionReadout,
    AttentionRowsReadout,
    FloatArray,
    ProbeReadout,
    QKReadout,
    Readout,
    Status,
    SteeringReport,
    empty,
    is_averaged,
    join,
    not_complete,
    size_bytes,
)
from guard.mia.routing import CACHED
from guard.mia.row_ring import OverwrittenError, Places, RingAddress, RingReader
from guard.mia.spec import AttentionCapture, Capture, HiddenCapture, MiaSpec, ProbeCapture, QKCapture, generates

NO_RING = "no space for these rows at once (max_shared_bytes)"
TOO_LONG = "no space for what this answer's readouts grow to (max_host_bytes)"

SETTLE_STEPS = 64
"""What a step has read is put to its requests within so many steps."""

SETTLE_PART = 4
"""And before a fourth of the ring holds rows that wait. At every step a few requests have their turn, so that no step
costs much more than another."""


OWN = Base()
"""Of a plan that is for one step alone."""


@dataclass(frozen=True)
class Asked:
    """What the front end knows of one request. ``longest``: tokens that prompt and answer may have; ``hidden_size``: of
    the model; ``max_grown_bytes``: most that what grows with the answer may take."""

    spec: MiaSpec
    prompt_len: int
    longest: int
    hidden_size: int
    max_grown_bytes: int = 2**63


@dataclass(frozen=True)
class Waiting:
    """One choice of a request. ``destination``: whoever the readouts go to."""

    asked: Asked
    destination: Any


@dataclass
class AttentionSum:
    """Attention from several tokens, added up: ``mass[span]`` ``[heads]``, weights ``[heads, tokens]``."""

    positions: list[int] = field(default_factory=list)
    mass: dict[str, FloatArray] = field(default_factory=dict)
    weights: FloatArray | None = None


Part = ProbeReadout | AttentionRowsReadout | QKReadout


@dataclass
class Gathered:
    """What was read of one request and not yet delivered.

    ``next_record``: number of the first record that is not in here yet. By capture: ``rows`` of the residual stream,
    ``means`` of those whose mean alone is asked for, ``sums`` of attention that is averaged, ``parts`` of all else.
    ``failed``: captures that cannot become complete any more, and why. ``grown_bytes``: of what grows with the answer.
    ``prompt_due``: the prompt was read, and not yet delivered. ``unsent_steps``: in which it was read since its last
    progress, where it asks for that; ``told``: parts of a capture that its progress has shown.
    """

    asked: Asked
    captures: dict[str, Capture]
    next_record: int
    rows: dict[str, GrowingRows] = field(default_factory=dict)
    means: dict[str, RowSum] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[str, AttentionSum] = field(default_factory=lambda: defaultdict(AttentionSum))
    failed: dict[str, tuple[Status, str]] = field(default_factory=dict)
    steering: list[SteeringReport] = field(default_factory=list)
    grown_bytes: int = 0
    prompt_due: bool = False
    unsent_steps: int = 0
    told: dict[str, int] = field(default_factory=dict)

    def fail(self, capture: str, reason: str, status: Status = "dropped") -> None:
        """A capture cannot become complete any more, and neither can what waits for it."""
        self.failed.setdefault(capture, (status, reason))
        for read in (self.rows, self.means, self.parts, self.sums):
            read.pop(capture, None)
        for i, steer in enumerate(self.asked.spec.steer):
            if steer.gate is not None and steer.gate.readout == capture and self.steering[i].opened_at is None:
                self.steering[i] = replace(self.steering[i], reason=f"readout {capture!r}: {reason}")


@dataclass(frozen=True)
class Run:
    """Consecutive steps of one layout, put together once for all requests in them."""

    records: list[StepRecord]

    @cached_property
    def doses(self) -> FloatArray:
        """``[steps, doses]``."""
        doses: FloatArray = np.stack([record.doses for record in self.records])
        return doses

    @cached_property
    def values(self) -> FloatArray:
        """``[steps, values]``."""
        values: FloatArray = np.stack([record.values for record in self.records])
        return values

    @property
    def layout(self) -> StepLayout:
        return self.records[0].layout

    @property
    def offset(self) -> int:
        """Of the first step."""
        return self.records[0].offset


@dataclass(frozen=True)
class Stretch:
    """Runs in which a request has one plan, put together once for all that it reads: more than one where the plan
    stands for many steps. bases: of each run."""

    plan: RequestPlan
    runs: list[Run]
    bases: list[Base]

    @property
    def start(self) -> int:
        """The token that the plan counts from in the first step."""
        return self.bases[0].token + self.runs[0].offset

    @property
    def steps(self) -> int:
        return sum(len(run.records) for run in self.runs)

    @cached_property
    def places(self) -> Places | None:
        """In the ring, of the slot that the plan counts from in each step; None when a step's rows found no space."""
        places = [
            None if record.hidden is None else record.hidden + base.slot - run.layout.sent[0]
            for run, base in zip(self.runs, self.bases, strict=True)
            for record in run.records
        ]
        return None if None in places else np.asarray(places, np.int64)

    def doses(self, chunk: SteerChunk) -> list[FloatArray]:
        """Those of tokens that no step had steered before."""
        return [
            run.doses[:, base.dose + chunk.fresh : base.dose + chunk.end].reshape(-1)
            for run, base in zip(self.runs, self.bases, strict=True)
        ]


@dataclass
class Wanted:
    """Rows of one capture that are still in the ring: at which places, and of which tokens."""

    layer: int
    places: list[Places] = field(default_factory=list)
    positions: list[range] = field(default_factory=list)
    one_row: bool = True


class Assembler:
    """One engine's records in, its requests' readouts out.

    The log holds records ``first`` to ``end``, and what is older is with its requests. ``requests``: those whose turn
    to be settled comes first stand first.
    """

    def __init__(self, ring: RingAddress) -> None:
        self._ring = RingReader(ring)
        self._dose_limit = np.inf
        self._log: list[StepRecord] = []
        self._first = 0
        self._runs: dict[int, list[Run]] = {}
        self._due: set[str] = set()
        self.requests: dict[str, Gathered] = {}
        self._progressing: dict[str, Gathered] = {}

    @property
    def _end(self) -> int:
        return self._first + len(self._log)

    @property
    def has_news(self) -> bool:
        """Whether ``prompt`` or ``progress`` may have something of any request."""
        return bool(self._due or self._progressing)

    def take(self, record: StepRecord, waiting: Mapping[str, Waiting]) -> None:
        """Keep a step's record. ``waiting``: those that have not ended; some may have since the step began."""
        if not self._log or self._log[-1].layout is not record.layout:
            for request_id in record.layout.requests.keys() - self.requests.keys():
                if (one := waiting.get(request_id)) is not None:
                    spec = one.asked.spec
                    reports = [SteeringReport() for _ in spec.steer]
                    gathered = Gathered(one.asked, spec.captures, next_record=self._end, steering=reports)
                    self.requests[request_id] = gathered
                    if spec.progress_tokens is not None:
                        self._progressing[request_id] = gathered
        self._log.append(record)
        self._dose_limit = record.layout.dose_limit
        self._runs = {}
        if record.offset == 0:
            ended = (id_ for id_, one in record.layout.requests.items() if one.prompt_ended)
            self._due.update(id_ for id_ in ended if id_ in self.requests)
        for request_id, gathered in self._progressing.items():
            gathered.unsent_steps += request_id in record.layout.requests
        first, end = record.layout.sent
        steps = min(SETTLE_STEPS, max(1, self._ring.address.rows // SETTLE_PART // max(1, end - first)))
        for request_id in list(islice(self.requests, -(-len(self.requests) // steps))):
            self._settle(request_id)
        self._forget_settled()

    def prompt(self, request_id: str) -> dict[str, Readout] | None:
        """The readouts of a request's prompt, once, when it was read to its end by the last record."""
        if request_id not in self._due:
            return None
        self._due.discard(request_id)
        gathered = self.requests[request_id]
        self._settle(request_id)
        if not gathered.prompt_due:
            return None
        gathered.prompt_due = False
        captures = {name: one for name, one in gathered.captures.items() if not generates(one)}
        return {name: _readout(gathered, name, capture) for name, capture in captures.items()}

    def progress(self, request_id: str) -> dict[str, Readout] | None:
        """What has grown with an answer since this last was not None, as often as the request wants to see it."""
        gathered = self._progressing.get(request_id)
        if gathered is None or gathered.unsent_steps < (gathered.asked.spec.progress_tokens or SETTLE_STEPS):
            return None
        gathered.unsent_steps = 0
        self._settle(request_id)
        captures = {name: one for name, one in gathered.captures.items() if generates(one)}
        news = {name: _news(gathered, name, capture) for name, capture in captures.items()}
        return {name: item for name, item in news.items() if item is not None}

    def end(self, request_id: str) -> tuple[dict[str, Readout], tuple[SteeringReport, ...]]:
        """What grew with the answer, and what steering did. The request is forgotten."""
        gathered = self.requests[request_id]
        self._settle(request_id)
        captures = {name: one for name, one in gathered.captures.items() if generates(one)}
        items = {name: _readout(gathered, name, capture) for name, capture in captures.items()}
        self.forget([request_id])
        return items, tuple(gathered.steering)

    def forget(self, request_ids: list[str]) -> None:
        """Requests have ended."""
        for request_id in request_ids:
            self.requests.pop(request_id, None)
            self._progressing.pop(request_id, None)
            self._due.discard(request_id)
        if not self.requests:
            self._forget_settled()

    def _forget_settled(self) -> None:
        """Records that nobody waits for."""
        oldest = next(iter(self.requests.values())).next_record if self.requests else self._end
        if oldest > self._first:
            del self._log[: oldest - self._first]
            self._first = oldest

    def _settle(self, request_id: str) -> None:
        """Put the records since the last time to a request's readouts; its next turn comes behind all others."""
        gathered = self.requests.pop(request_id)
        self.requests[request_id] = gathered
        wanted: dict[str, Wanted] = {}
        doses: dict[int, list[FloatArray]] = defaultdict(list)
        for stretch in _stretches(self._runs_from(gathered.next_record), request_id):
            _put(gathered, request_id, stretch, wanted, doses)
        for i, parts in doses.items():
            gathered.steering[i] = _with_doses(gathered.steering[i], np.concatenate(parts), self._dose_limit)
        for name, rows in wanted.items():
            if name not in gathered.failed:
                _take_rows(gathered, name, rows, self._ring)
        gathered.next_record = self._end

    def _runs_from(self, first: int) -> list[Run]:
        """The log from a record on."""
        if first not in self._runs:
            groups = groupby(self._log[first - self._first :], key=lambda record: record.layout.number)
            self._runs[first] = [Run(list(group)) for _, group in groups]
        return self._runs[first]


def _stretches(runs: Iterable[Run], request_id: str) -> list[Stretch]:
    """Of the runs that have something of the request."""
    found: list[Stretch] = []
    for run in runs:
        layout = run.layout
        if (plan := layout.requests.get(request_id)) is None:
            continue
        base = layout.bases.get(request_id, OWN)
        if found and found[-1].plan is plan:
            found[-1].runs.append(run)
            found[-1].bases.append(base)
        else:
            found.append(Stretch(plan, [run], [base]))
    return found


def _put(
    gathered: Gathered,
    request_id: str,
    stretch: Stretch,
    wanted: dict[str, Wanted],
    doses: dict[int, list[FloatArray]],
) -> None:
    """What steps of one plan have read of one request. Rows are only noted in ``wanted``, and what a steering did in
    ``doses``: in a busy engine every step has a layout of its own, and every request is in it."""
    one, last = stretch.plan, stretch.runs[-1]
    for capture, reason in one.failed.items():
        gathered.fail(capture, reason, "unavailable" if reason == CACHED else "dropped")
    for i, reason in one.shut.items():
        gathered.steering[i] = replace(gathered.steering[i], reason=reason)
    for chunk in one.rows:
        if chunk.capture not in gathered.failed:
            _read(gathered, request_id, chunk, stretch, wanted)
    for steer in one.steer:
        doses[steer.index] += stretch.doses(steer)
    for i, place in one.gates.items():
        opened_at = int(last.records[-1].opened_at[place])
        if opened_at != SHUT:
            gathered.steering[i] = replace(gathered.steering[i], opened_at=opened_at, reason="")
    gathered.prompt_due = gathered.prompt_due or (one.prompt_ended and last.offset == 0)


def _read(gathered: Gathered, request_id: str, chunk: RowChunk, stretch: Stretch, wanted: dict[str, Wanted]) -> None:
    """What one capture read in these steps."""
    name, capture = chunk.capture, gathered.captures[chunk.capture]
    if isinstance(capture, HiddenCapture):
        _want_rows(gathered, chunk, stretch, wanted)
        return
    for run, base in zip(stretch.runs, stretch.bases, strict=True):
        start = base.token + chunk.start + run.offset
        positions = range(start, start + chunk.length * len(run.records))
        part = _part_of(capture, request_id, chunk, base.slot, positions, run)
        if is_averaged(capture):
            assert isinstance(part, AttentionRowsReadout)
            _add(gathered.sums[name], part)
        else:
            gathered.parts[name].append(part)
        _grow(gathered, name, size_bytes(part))
        if name in gathered.failed:
            return


def _grow(gathered: Gathered, name: str, size: int) -> None:
    """Count what grows with the answer; beyond the limit the capture is lost."""
    if generates(gathered.captures[name]):
        gathered.grown_bytes += size
        if gathered.grown_bytes > gathered.asked.max_grown_bytes:
            gathered.fail(name, TOO_LONG)


def _want_rows(gathered: Gathered, chunk: RowChunk, stretch: Stretch, wanted: dict[str, Wanted]) -> None:
    """Note where they are: one copy out of the ring serves all steps since the last."""
    ((layer, slot),) = chunk.slots.items()
    if stretch.places is None:
        gathered.fail(chunk.capture, NO_RING)
        return
    places = stretch.places + slot
    if chunk.length > 1:
        places = (places[:, None] + np.arange(chunk.length)).reshape(-1)
    start = stretch.start + chunk.start
    rows = wanted.setdefault(chunk.capture, Wanted(layer))
    rows.places.append(places)
    rows.positions.append(range(start, start + chunk.length * stretch.steps))
    rows.one_row = rows.one_row and chunk.length == 1


def _take_rows(gathered: Gathered, name: str, wanted: Wanted, ring: RingReader) -> None:
    """Out of the ring, before others take their place."""
    capture = gathered.captures[name]
    places = wanted.places[0] if len(wanted.places) == 1 else np.concatenate(wanted.places)
    averaged = isinstance(capture, HiddenCapture) and capture.average
    try:
        if averaged:
            values = np.empty((len(places), ring.address.width), np.float32)
            ring.take(places, values)
            if (total := gathered.means.get(name)) is None:
                total = gathered.means[name] = RowSum.of(wanted.layer, ring.address.width)
            total.add(wanted.positions, values)
        else:
            ring.take(places, _rows_of(gathered, name, wanted, ring).next(wanted.positions))
    except OverwrittenError as error:
        gathered.fail(name, str(error))
    except OSError as error:
        reason = f"the worker's memory cannot be read here: {error.strerror}"
        gathered.fail(name, reason, "unavailable")
    else:
        _grow(gathered, name, 4 * len(places) * ring.address.width)


def _rows_of(gathered: Gathered, name: str, wanted: Wanted, ring: RingReader) -> GrowingRows:
    """What there is of a capture's rows, with room for as many as may come."""
    if (rows := gathered.rows.get(name)) is None:
        grows, asked = generates(gathered.captures[name]), gathered.asked
        longest = asked.longest if grows else asked.prompt_len
        expected = 1 if wanted.one_row and not grows else longest
        rows = gathered.rows[name] = GrowingRows.expecting(wanted.layer, expected, ring.address.width)
    return rows


def _part_of(capture: Capture, request_id: str, chunk: RowChunk, first_slot: int, positions: range, run: Run) -> Part:
    """What one capture of probes, attention or queries read in these steps."""
    layout, length = run.layout, chunk.length
    if isinstance(capture, ProbeCapture):
        ((_, slot),) = chunk.slots.items()
        logits = run.values[:, : layout.logits].reshape(len(run.records), -1, layout.outputs)
        slot += first_slot
        mine = logits[:, slot : slot + length, slice(*chunk.columns)]
        return ProbeReadout("complete", capture.probe, tuple(positions), logits=mine.reshape(len(positions), -1))
    # These are never of several steps: what they read grows.
    (record,) = run.records
    key = request_id, chunk.capture, chunk.start
    if isinstance(capture, QKCapture):
        return record.queries[key]
    assert isinstance(capture, AttentionCapture)
    values = record.values[layout.logits + chunk.mass :]
    mass = values[: length * len(capture.heads) * len(capture.spans)].reshape(length, len(capture.heads), -1)
    return AttentionRowsReadout(
        "complete",
        capture.heads,
        tuple(positions),
        mass={span: mass[:, :, column] for column, span in enumerate(capture.spans)},
        weights=record.weights.get(key),
    )


def _with_doses(report: SteeringReport, doses: FloatArray, limit: float) -> SteeringReport:
    """doses: of tokens that no step had steered before."""
    doses = doses[doses != HELD_BACK]
    if not len(doses):
        return report
    # JSON has no word for what is beyond float32, or for what becomes of a stream that is.
    doses = np.minimum(np.nan_to_num(doses, nan=np.inf), np.finfo(np.float32).max)
    return replace(
        report,
        steered_tokens=report.steered_tokens + len(doses),
        relative_dose=max(report.relative_dose, float(doses.max())),
        limited_tokens=report.limited_tokens + int((doses > limit).sum()),
    )


def _readout(gathered: Gathered, name: str, capture: Capture) -> Readout:
    """One capture's readout, or why there is none. Of a capture that no token was read for it is complete and empty."""
    if (failure := gathered.failed.get(name)) is not None:
        return not_complete(capture, *failure)
    if isinstance(capture, HiddenCapture):
        if (total := gathered.means.pop(name, None)) is not None:
            return total.mean()
        rows = gathered.rows.pop(name, None)
        if rows is None:
            return empty(capture, gathered.asked.hidden_size)
        return rows.only() if capture.positions == "last_prompt" else rows.readout()
    if is_averaged(capture):
        assert isinstance(capture, AttentionCapture)
        return _mean(gathered.sums.pop(name), capture, gathered.asked.prompt_len)
    parts = gathered.parts.pop(name, None)
    return join(parts) if parts else empty(capture, gathered.asked.hidden_size)  # type: ignore[type-var]


def _news(gathered: Gathered, name: str, capture: Capture) -> Readout | None:
    """What has come of a growing capture since it was last asked for; a failure is said once."""
    told = gathered.told.get(name, 0)
    if (failure := gathered.failed.get(name)) is not None:
        gathered.told[name] = -1
        return not_complete(capture, *failure) if told >= 0 else None
    if (rows := gathered.rows.get(name)) is not None:
        gathered.told[name] = len(rows.positions)
        return rows.readout(since=told) if len(rows.positions) > told else None
    parts = gathered.parts.get(name, [])
    gathered.told[name] = len(parts)
    return join(parts[told:]) if len(parts) > told else None  # type: ignore[type-var]


def _add(total: AttentionSum, part: AttentionRowsReadout) -> None:
    total.positions += part.positions
    for span, mass in part.mass.items():
        total.mass[span] = total.mass.get(span, np.float32(0)) + mass.sum(axis=0)
    if part.weights is not None:
        added = part.weights.sum(axis=0)
        if total.weights is not None:
            added[:, : total.weights.shape[1]] += total.weights
        total.weights = added


def _mean(total: AttentionSum, capture: AttentionCapture, prompt_len: int) -> AttentionReadout:
    count = np.float32(len(total.positions))
    mass = {span: mass / count for span, mass in total.mass.items()}
    weights = None
    if total.weights is not None:
        weights = np.pad(total.weights / count, ((0, 0), (0, prompt_len - total.weights.shape[1])))
    return AttentionReadout("complete", capture.heads, tuple(total.positions), mass=mass, weights=weights)
