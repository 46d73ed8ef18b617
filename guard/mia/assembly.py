"""Records of steps become the readouts of requests.

Owns what was read and not yet sent, the formulas over several steps (means, reports), and when something is sent:
readouts of the prompt with the first token, what grows with the answer every ``SETTLE_STEPS`` steps and at its end.
Until then a step's record is only kept, so that a step costs the same however many requests it reads. Lives in the
engine's core, which alone knows that a request has ended; never touches vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch

from guard.mia.ops import SHUT
from guard.mia.record import StepRecord
from guard.mia.results import (
    AttentionReadout,
    AttentionRowsReadout,
    FloatArray,
    HiddenReadout,
    ProbeReadout,
    Readout,
    RowsReadout,
    Status,
    SteeringReport,
    StepReading,
    is_averaged,
    join,
    not_complete,
)
from guard.mia.routing import CACHED, RequestPlan, RowChunk
from guard.mia.spec import AttentionCapture, Capture, MiaSpec, QKCapture, generates

SETTLE_STEPS = 32
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
    """

    spec: MiaSpec
    prompt_len: int
    captures: dict[str, Capture]
    next_record: int
    parts: dict[str, list[Readout]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[str, AttentionSum] = field(default_factory=lambda: defaultdict(AttentionSum))
    failed: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    steering: list[SteeringReport] = field(default_factory=list)
    prompt_due: bool = False

    def fail(self, capture: str, reason: str) -> None:
        """A capture cannot become complete any more, and neither can what waits for it."""
        self.failed.setdefault(capture, reason)
        self.parts.pop(capture, None)
        self.sums.pop(capture, None)
        for i, steer in enumerate(self.spec.steer):
            if steer.gate is not None and steer.gate.readout == capture and self.steering[i].opened_at is None:
                self.steering[i] = replace(self.steering[i], reason=f"readout {capture!r}: {reason}")


class Assembler:
    """One engine's records in, its requests' readings out."""

    def __init__(self) -> None:
        self._log: list[StepRecord] = []
        self._due: set[str] = set()
        self.requests: dict[str, Gathered] = {}

    def take(self, record: StepRecord, alive: Container[str]) -> None:
        """Keep a step's record. ``alive``: requests that have not ended; some may have since the step began."""
        for request_id, (spec, prompt_len) in record.layout.added.items():
            if request_id not in alive:
                continue
            reports = [SteeringReport() for _ in spec.steer]
            self.requests[request_id] = Gathered(
                spec, prompt_len, spec.captures, next_record=len(self._log), steering=reports
            )
        self._log.append(record)
        if record.layout.offset == 0:
            ended = (id_ for id_, one in record.layout.requests.items() if one.prompt_ended)
            self._due.update(id_ for id_ in ended if id_ in self.requests)
        if len(self._log) >= SETTLE_STEPS:
            for request_id, gathered in self.requests.items():
                self._settle(request_id, gathered)
                gathered.next_record = 0
            self._log = []
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
            self._due.discard(request_id)
        if not self.requests:
            self._log = []

    def _settle(self, request_id: str, gathered: Gathered) -> None:
        """Put the records since the last time to a request's readouts."""
        news = self._log[gathered.next_record :]
        gathered.next_record = len(self._log)
        for _, group in groupby(news, key=lambda record: id(record.layout.requests)):
            records = list(group)
            one = records[0].layout.requests.get(request_id)
            if one is not None:
                _put(gathered, request_id, one, records)


def _put(gathered: Gathered, request_id: str, one: RequestPlan, records: list[StepRecord]) -> None:
    """What consecutive steps of one layout have read of one request."""
    for capture, reason in one.failed.items():
        gathered.fail(capture, reason)
    for i, reason in one.shut.items():
        gathered.steering[i] = replace(gathered.steering[i], reason=reason)
    for chunk in one.rows:
        if chunk.capture not in gathered.failed:
            part = _part_of(gathered, request_id, chunk, records)
            if isinstance(part, AttentionRowsReadout) and is_averaged(gathered.captures[chunk.capture]):
                _add(gathered.sums[chunk.capture], part)
            else:
                gathered.parts[chunk.capture].append(part)
    for steer in one.steer:
        doses = torch.cat([record.doses[steer.fresh : steer.end] for record in records]).numpy()
        limit = records[0].layout.dose_limit
        gathered.steering[steer.index] = _with_doses(gathered.steering[steer.index], doses[doses >= 0.0], limit)
    for i, place in one.gates.items():
        opened_at = int(records[-1].opened_at[place])
        if opened_at != SHUT:
            gathered.steering[i] = replace(gathered.steering[i], opened_at=opened_at, reason="")
    gathered.prompt_due = gathered.prompt_due or (one.prompt_ended and records[0].layout.offset == 0)


def _part_of(gathered: Gathered, request_id: str, chunk: RowChunk, records: list[StepRecord]) -> Readout:
    """What one capture read in these steps."""
    capture, length = gathered.captures[chunk.capture], chunk.length
    starts = [chunk.start + record.layout.offset for record in records]
    positions = tuple(position for start in starts for position in range(start, start + length))
    if isinstance(capture, QKCapture):
        return join([record.queries[request_id, chunk.capture, chunk.start] for record in records])
    if isinstance(capture, AttentionCapture):
        return _attention_part(capture, request_id, chunk, records, positions)
    ((layer, slot),) = chunk.slots.items()
    if chunk.columns[1]:
        logits = torch.cat([_logits(record, slot, length)[:, slice(*chunk.columns)] for record in records])
        return ProbeReadout("complete", capture.probe, positions, logits=logits.numpy())  # type: ignore[union-attr]
    rows = [record.hidden[slot - record.layout.sent[0] :][:length] for record in records]
    return RowsReadout("complete", layer, positions, values=torch.cat(rows).float().numpy())


def _logits(record: StepRecord, slot: int, length: int) -> torch.Tensor:
    layout = record.layout
    return record.values[: layout.logits].view(-1, layout.outputs)[slot : slot + length]


def _attention_part(
    capture: AttentionCapture,
    request_id: str,
    chunk: RowChunk,
    records: list[StepRecord],
    positions: tuple[int, ...],
) -> AttentionRowsReadout:
    shape = chunk.length, len(capture.heads), len(capture.spans)
    size = shape[0] * shape[1] * shape[2]
    masses = [record.values[record.layout.logits + chunk.mass :][:size].view(shape) for record in records]
    whole = torch.cat(masses).numpy()
    weights = None
    if capture.weights:
        (record,) = records
        weights = record.weights[request_id, chunk.capture, chunk.start].numpy()
    mass = {span: whole[:, :, column] for column, span in enumerate(capture.spans)}
    return AttentionRowsReadout("complete", capture.heads, positions, mass=mass, weights=weights)


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


def _prompt(gathered: Gathered) -> dict[str, Readout]:
    """All readouts of one request's prompt, which has been read to its end."""
    items: dict[str, Readout] = {}
    for name, capture in gathered.captures.items():
        if generates(capture):
            continue
        if isinstance(capture, AttentionCapture) and is_averaged(capture) and name not in gathered.failed:
            items[name] = _mean(gathered.sums.pop(name), capture, gathered.prompt_len)
            continue
        item = _part(gathered, name, capture)
        single = isinstance(item, RowsReadout) and capture.positions == "last_prompt"
        items[name] = _single(item) if single and isinstance(item, RowsReadout) else item
    return items


def _has_news(gathered: Gathered, name: str) -> bool:
    return bool(gathered.parts.get(name)) or (name in gathered.failed and name not in gathered.told)


def _part(gathered: Gathered, name: str, capture: Capture) -> Readout:
    """What was gathered of one capture since it was last sent, or why there will be nothing."""
    if (reason := gathered.failed.get(name)) is not None:
        return not_complete(capture, _status_of(reason), reason)
    part: Readout = join(gathered.parts.pop(name))  # type: ignore[type-var]
    return part


def _single(rows: RowsReadout) -> HiddenReadout:
    if rows.values is None:
        return HiddenReadout(rows.status, rows.layer, reason=rows.reason)
    return HiddenReadout("complete", rows.layer, rows.positions[0], None, rows.values[0])


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
