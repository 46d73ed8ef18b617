"""Readouts as they come beside an answer, and taking them off it.

Owns recognising and parsing the aperture's event in its wire forms. Whatever is wrong with it is a reason, never an
exception: "no score" is for the policy to judge.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from guard.mia.results import EVENT_OBJECT, Readouts
from guard.telemetry.record import GateReport

EVENT_START = f'{{"object": "{EVENT_OBJECT}"'.encode()
"""How the aperture writes an event. vLLM's own frames begin with an id, and inside a JSON string quotes are escaped."""

FRAME_START = b"data: " + EVENT_START
FIELD_START = b',"mia":' + EVENT_START

UNREADABLE = (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What an event that is none raises."""


@dataclass(frozen=True)
class Finding:
    """The readouts of the prompt, or why there are none. ``arrived_s``: when their bytes were there.

    ``timed_out``: there are none because they did not come in time.
    """

    readouts: Readouts | None
    reason: str = ""
    arrived_s: float = field(default_factory=time.perf_counter)
    timed_out: bool = False


def from_event(text: bytes, arrived_s: float) -> Finding:
    """One event as JSON. Of several choices the one with most complete readouts counts: the prompt is the same."""
    return finding_in(readouts_of(text), arrived_s)


def finding_in(event: Sequence[Readouts] | None, arrived_s: float) -> Finding:
    """The same of an event that is parsed already; None: it cannot be read."""
    if event is None:
        return Finding(None, "the engine's readouts cannot be read", arrived_s)
    of_prompt = [one for one in event if one.stage == "prompt"]
    if not of_prompt:
        return Finding(None, "the engine sent no readouts of the prompt", arrived_s)
    return Finding(most_complete(of_prompt), arrived_s=arrived_s)


def readouts_of(text: bytes) -> list[Readouts] | None:
    """Those of one event, of all stages; None when they cannot be read: a score is then missing."""
    try:
        event = msgspec.json.decode(text)
        if event["object"] != EVENT_OBJECT:
            return None
        return [Readouts.from_wire(wire) for wire in event["readouts"]]
    except UNREADABLE:
        return None


def is_event(frame: bytes) -> bool:
    """Whether a frame of a stream is ours, and so not for the client, even if it cannot be read."""
    return frame.startswith(FRAME_START)


def split_field(body: bytes) -> tuple[bytes, bytes | None]:
    """A JSON answer as vLLM wrote it, and the event that was added as its last field if there is one."""
    at = body.rfind(FIELD_START)
    if at < 0:
        return body, None
    return body[:at] + b"}", body[at + len(b',"mia":') : -1]


def most_complete(parsed: Sequence[Readouts]) -> Readouts:
    """Of readouts of one prompt those with the most that is complete."""
    return max(parsed, key=lambda one: sum(item.status == "complete" for item in one.items.values()))


def gate_reports(gated: Mapping[str, int], readouts: Sequence[Readouts]) -> dict[str, GateReport]:
    """By rule, as far as answers that have ended tell. gated: rule -> which steering of the request is its."""
    ended = [one for one in readouts if one.stage == "final"]
    told = {rule: [one.steering[i] for one in ended if i < len(one.steering)] for rule, i in gated.items()}
    return {
        rule: GateReport(
            choices=len(reports),
            opened=sum(one.opened_at is not None for one in reports),
            first_at=min((one.opened_at for one in reports if one.opened_at is not None), default=None),
            reason=next((one.reason for one in reports if one.reason), ""),
        )
        for rule, reports in told.items()
        if reports
    }
