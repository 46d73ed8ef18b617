"""Records of steps become the readouts of requests.

Owns what was read and not yet sent, the formulas over several steps (means, reports), and when something is sent:
readouts of the prompt with the first token, what grows with the answer every ``SETTLE_STEPS`` steps, or as often as a
request wants to see it grow, and at its end.
Until then a step's record is only kept, so that a step costs the same however many requests it reads. Lives in the
engine's core, which alone knows that a request has ended; never touches vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import torch

from guard.mia.ops import HELD_BACK, SHUT
from guard.mia.plan import RequestPlan, RowChunk, StepLayout
from guard.mia.record import StepRecord
from guard.mia.results import (
    AttentionReadout,
    AttentionRowsReadout,
    FloatArray,
    ProbeReadout,
    Status,
    SteeringReport,
    is_averaged,
    join,
    not_complete,
)
from guard.mia.routing import CACHED
from guard.mia.spec import AttentionCapture, Capture, MiaSpec, ProbeCapture, QKCapture, generates
from guard.mia.step_reading import Part, RingReadout, RingRows, StepReading, join_ring

NO_RING = "no space for these rows at once (max_shared_bytes)"

SETTLE_STEPS = 64
"""After so many records everything is put to its requests, and what has grown is sent."""


@dataclass
class AttentionSum:
    """Attention from several tokens, added up: ``mass[span]`` ``[heads]``, weights ``[heads, tokens]``."""

    positions: list[int] = field(default_factory=list)
    mass: dict[str, FloatArray] = field(default_factory=dict)
    weights: FloatArray | None = None


@dataclass
class Gathered:
    """What was read of one request and not yet sent.

    ``next_record``: the first record in the log that is not in here yet. ``parts``: by capture, ``sums``: of attention
    that is averaged. ``failed``: captures that cannot become complete any more, and why; ``told``: those among them
    that go on through the answer and whose failure was sent. ``prompt_due``: the prompt was read, and not yet sent.
    ``unsent_steps``: in which it was read since it last sent something, where it asks for progress.
    """

    spec: MiaSpec
    prompt_len: int
    captures: dict[str, Capture]
    next_record: int
    parts: dict[str, list[Part]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[str, AttentionSum] = field(default_factory=lambda: defaultdict(AttentionSum))
    failed: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    steering: list[SteeringReport] = field(default_factory=list)
    prompt_due: bool = False
    unsent_steps: int = 0

    def fail(self, capture: str, reason: str) -> None:
        """A capture cannot become complete any more, and neither can what waits for it."""
        self.failed.setdefault(capture, reason)
        self.parts.pop(capture, None)
        self.sums.pop(capture, None)
        for i, steer in enumerate(self.spec.steer):
            if steer.gate is not None and steer.gate.readout == capture and self.steering[i].opened_at is None:
                self.steering[i] = replace(self.steering[i], reason=f"readout {capture!r}: {reason}")


@dataclass(frozen=True)
class Run:
    """Consecutive steps of one layout, put together once for all requests in them."""

    records: list[StepRecord]

    @cached_property
    def doses(self) -> FloatArray:
        """``[steps, doses]``."""
        doses: FloatArray = torch.stack([record.doses for record in self.records]).numpy()
        return doses

    @cached_property
    def values(self) -> FloatArray:
        """``[steps, values]``."""
        values: FloatArray = torch.stack([record.values for record in self.records]).numpy()
        return values

    @property
    def layout(self) -> StepLayout:
        """Of the first step."""
        return self.records[0].layout


class Assembler:
    """One engine's records in, its requests' readings out."""

    def __init__(self) -> None:
        self._log: list[StepRecord] = []
        self._runs: dict[tuple[int, int], list[Run]] = {}
        self._due: set[str] = set()
        self.requests: dict[str, Gathered] = {}
        self._progressing: dict[str, Gathered] = {}

    def take(self, record: StepRecord, alive: Container[str]) -> None:
        """Keep a step's record. ``alive``: requests that have not ended; some may have since the step began."""
        for request_id, (spec, prompt_len) in record.layout.added.items():
            if request_id not in alive:
                continue
            reports = [SteeringReport() for _ in spec.steer]
            gathered = Gathered(spec, prompt_len, spec.captures, next_record=len(self._log), steering=reports)
            self.requests[request_id] = gathered
            if spec.progress_tokens is not None:
                self._progressing[request_id] = gathered
        self._log.append(record)
        if record.layout.offset == 0:
            ended = (id_ for id_, one in record.layout.requests.items() if one.prompt_ended)
            self._due.update(id_ for id_ in ended if id_ in self.requests)
        for request_id, gathered in self._progressing.items():
            gathered.unsent_steps += request_id in record.layout.requests
            if gathered.unsent_steps >= (gathered.spec.progress_tokens or SETTLE_STEPS):
                self._due.add(request_id)
        if len(self._log) >= SETTLE_STEPS:
            for request_id, gathered in self.requests.items():
                self._settle(request_id, gathered)
                gathered.next_record = 0
            self._log, self._runs = [], {}
            self._due.update(self.requests)

    def is_due(self, request_id: str) -> bool:
        """Whether a request has something to send with its next output."""
        return request_id in self._due

    def reading(self, request_id: str, *, ended: bool) -> StepReading | None:
        """What a request has to send with the output of the last record's step. ``ended``: it is the last output."""
        gathered = self.requests.get(request_id)
        if gathered is None:
            return None
        self._due.discard(request_id)
        gathered.unsent_steps = 0
        self._settle(request_id, gathered)
        prompt = _prompt(gathered) if gathered.prompt_due else None
        grown = {
            name: _part(gathered, name, capture)
            for name, capture in gathered.captures.items()
            if generates(capture) and _has_news(gathered, name)
        }
        gathered.told |= gathered.failed.keys()
        steering = tuple(gathered.steering) if ended or prompt is not None else ()
        gathered.prompt_due = False
        reading = StepReading(prompt, grown, steering)
        return reading if reading else None

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests have ended."""
        for request_id in request_ids:
            self.requests.pop(request_id, None)
            self._progressing.pop(request_id, None)
            self._due.discard(request_id)
        if not self.requests:
            self._log, self._runs = [], {}

    def _settle(self, request_id: str, gathered: Gathered) -> None:
        """Put the records since the last time to a request's readouts."""
        for run in self._runs_from(gathered.next_record):
            one = run.layout.requests.get(request_id)
            if one is not None:
                _put(gathered, request_id, one, run)
        gathered.next_record = len(self._log)

    def _runs_from(self, first: int) -> list[Run]:
        """The log from a record on. Most requests ask from the same."""
        key = first, len(self._log)
        if key not in self._runs:
            groups = groupby(self._log[first:], key=lambda record: id(record.layout.requests))
            self._runs[key] = [Run(list(group)) for _, group in groups]
        return self._runs[key]


def _put(gathered: Gathered, request_id: str, one: RequestPlan, run: Run) -> None:
    """What consecutive steps of one layout have read of one request."""
    for capture, reason in one.failed.items():
        gathered.fail(capture, reason)
    for i, reason in one.shut.items():
        gathered.steering[i] = replace(gathered.steering[i], reason=reason)
    for chunk in one.rows:
        if chunk.capture not in gathered.failed:
            part = _part_of(gathered, request_id, chunk, run)
            if part.status != "complete":
                gathered.fail(chunk.capture, part.reason)
            elif isinstance(part, AttentionRowsReadout) and is_averaged(gathered.captures[chunk.capture]):
                _add(gathered.sums[chunk.capture], part)
            else:
                gathered.parts[chunk.capture].append(part)
    for steer in one.steer:
        doses = run.doses[:, steer.fresh : steer.end].reshape(-1)
        report = gathered.steering[steer.index]
        gathered.steering[steer.index] = _with_doses(report, doses[doses != HELD_BACK], run.layout.dose_limit)
    for i, place in one.gates.items():
        opened_at = int(run.records[-1].opened_at[place])
        if opened_at != SHUT:
            gathered.steering[i] = replace(gathered.steering[i], opened_at=opened_at, reason="")
    gathered.prompt_due = gathered.prompt_due or (one.prompt_ended and run.layout.offset == 0)


def _part_of(gathered: Gathered, request_id: str, chunk: RowChunk, run: Run) -> Part:
    """What one capture read in these steps."""
    capture, length, layout = gathered.captures[chunk.capture], chunk.length, run.layout
    start = chunk.start + layout.offset
    positions = tuple(range(start, start + length * len(run.records)))
    if isinstance(capture, QKCapture | AttentionCapture):
        # They are never of several steps: what they read grows.
        (record,) = run.records
        key = request_id, chunk.capture, chunk.start
        if isinstance(capture, QKCapture):
            return record.queries[key]
        values, weights = run.values[0, layout.logits + chunk.mass :], record.weights.get(key)
        mass = values[: length * len(capture.heads) * len(capture.spans)].reshape(length, len(capture.heads), -1)
        return AttentionRowsReadout(
            "complete",
            capture.heads,
            positions,
            mass={span: mass[:, :, column] for column, span in enumerate(capture.spans)},
            weights=None if weights is None else weights.numpy(),
        )
    ((layer, slot),) = chunk.slots.items()
    if isinstance(capture, ProbeCapture):
        logits = run.values[:, : layout.logits].reshape(len(run.records), -1, layout.outputs)
        mine = logits[:, slot : slot + length, slice(*chunk.columns)]
        return ProbeReadout("complete", capture.probe, positions, logits=mine.reshape(len(positions), -1))
    slabs = [record.hidden for record in run.records if record.hidden is not None]
    if len(slabs) < len(run.records):
        return RingReadout("dropped", layer, reason=NO_RING)
    segments = [slab.segment(slot - layout.sent[0], length) for slab in slabs]
    return RingReadout("complete", layer, positions, RingRows(slabs[0].path, slabs[0].dtype, slabs[0].width, segments))


def _with_doses(report: SteeringReport, doses: FloatArray, limit: float) -> SteeringReport:
    """doses: of tokens that no step had steered before."""
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


def _prompt(gathered: Gathered) -> dict[str, Part]:
    """All readouts of one request's prompt, which has been read to its end."""
    items: dict[str, Part] = {}
    for name, capture in gathered.captures.items():
        if generates(capture):
            continue
        if isinstance(capture, AttentionCapture) and is_averaged(capture) and name not in gathered.failed:
            items[name] = _mean(gathered.sums.pop(name), capture, gathered.prompt_len)
            continue
        items[name] = _part(gathered, name, capture)
    return items


def _has_news(gathered: Gathered, name: str) -> bool:
    return bool(gathered.parts.get(name)) or (name in gathered.failed and name not in gathered.told)


def _part(gathered: Gathered, name: str, capture: Capture) -> Part:
    """What was gathered of one capture since it was last sent, or why there will be nothing."""
    if (reason := gathered.failed.get(name)) is not None:
        return not_complete(capture, _status_of(reason), reason)
    parts = gathered.parts.pop(name)
    in_ring = [part for part in parts if isinstance(part, RingReadout)]
    return join_ring(in_ring) if in_ring else join(parts)  # type: ignore[type-var]


def _status_of(reason: str) -> Status:
    return "unavailable" if reason == CACHED else "dropped"


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
