"""Decisions of the past, read back from a ledger: what was scored, and what was done about it.

Owns the way from a ledger's line to scores. Lines have no text of a prompt, so neither has anything here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detectors.base import Score
from guard.policy.loading import same_measurement
from guard.policy.over_time import Spread
from guard.policy.schema import Contract
from guard.policy.waits import Waits
from guard.telemetry.ledger_reader import Entry, LedgerReadError, cut, entries, find_all

MOST_NAMED = 5
WAITED = ("prompt", "answer")

UNDECIDED = "none"
"""The action of a request that did not come to a decision."""


@dataclass(frozen=True)
class RecordedAnswer:
    """What was made of one answer. ``whole``, ``end``: by detector's name, its scores over all the times that it was
    judged, and at its end. ``complete``: it was judged to its end; None in lines of versions that did not write it,
    which have the first scores of a stream and not the highest. ``times``: how often it was judged; None in lines that
    do not say so. ``digests``: as in ``Recorded``. ``beside``: what the
    shadow policy made of it. ``way``: how its decision was carried out; None where the line does not say so."""

    action: str
    rule: str | None
    reason: str | None
    complete: bool | None
    times: int | None
    whole: Mapping[str, Spread]
    end: Mapping[str, Spread]
    digests: Mapping[str, str]
    beside: RecordedAnswer | None = None
    way: str | None = None

    def spread(self, name: str, digest: str, *, end: bool) -> Spread | None:
        """What a policy's detector would have said; None when nothing like it was measured."""
        if self.digests or self.beside is not None:
            name = next((mine for mine, measured in self.digests.items() if same_measurement(measured, digest)), "")
        found = (self.end if end else self.whole).get(name)
        return self.beside.spread(name, digest, end=end) if found is None and self.beside is not None else found


@dataclass(frozen=True)
class Recorded:
    """One request. ``action``: of its prompt; ``rule``, ``reason``: of what decided, prompt or answer. ``scores`` by
    detector's name, ``by_digest`` by what was measured, the shadow policy's among them. ``gates``: by rule, what the
    engine told of its gate. ``contract``: what its policy said of streams; None where it is none, or the line does not
    say so. ``whole_action``: of prompt and answer. ``answers``: those that were generated again,
    then the last; none where no rule judged answers. ``way``: how the decision on the prompt was carried out; None
    where the line does not say so. ``waits``: how long scores were waited for; None where the line does not say so.
    ``prompt_s``: how long it took at most until those of the prompt were there, or the wait was over; ``total_s``: how
    long the request took. Both None where nothing says so.

    ``digests``: by detector's name, what was measured; empty in lines of versions that did not write them, where names
    are all there is to go by.
    """

    request_id: str
    client_request_id: str | None
    policy: str
    action: str
    rule: str | None
    reason: str | None
    assignment: str | None
    scores: Mapping[str, Score]
    digests: Mapping[str, str]
    by_digest: Mapping[str, Score]
    gates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    whole_action: str = UNDECIDED
    answers: tuple[RecordedAnswer, ...] = ()
    attempts: int = 0
    streamed: bool = False
    contract: Contract | None = None
    route: str = ""
    outcome: str = ""
    way: str | None = None
    waits: Waits | None = None
    prompt_s: float | None = None
    total_s: float | None = None

    @property
    def policy_name(self) -> str:
        return self.policy.partition("@")[0]

    def score(self, name: str, digest: str) -> Score | None:
        """The score that a policy's detector would have got; None when nothing like it was measured."""
        if not self.by_digest:
            return self.scores.get(name)
        like = (score for measured, score in self.by_digest.items() if same_measurement(measured, digest))
        return self.by_digest.get(digest) or next(like, None)


def read_ledger(path: Path) -> Iterator[Recorded | None]:
    """Every line of all its files in order; None for one that is no entry. Raises ``LedgerReadError``."""
    for entry in entries(path):
        yield None if entry is None else _recorded(entry)


def find_request(path: Path, request_id: str) -> Recorded:
    """The last entry of a request, by its own id, or by the client's where no request has it as its own and one client
    sent it. Raises ``LedgerReadError``."""
    of_id = find_all(path, request_id)
    entry = of_id.own
    if entry is None and of_id.of_clients:
        entry, *others = of_id.of_clients
        if others:
            ids = ", ".join(str(one["request_id"]) for one in of_id.of_clients[:MOST_NAMED])
            more = ", …" if len(of_id.of_clients) > MOST_NAMED else ""
            raise LedgerReadError(
                f"{path}: {len(of_id.of_clients)} requests have {request_id!r} from their clients; name one by its own "
                f"id: {ids}{more}"
            )
    found = None if entry is None else _recorded(entry)
    if found is None:
        raise LedgerReadError(f"{path}: has no request {request_id!r}{cut(request_id)}")
    return found


def _recorded(entry: Entry) -> Recorded | None:
    try:
        shadow, answer = entry.get("shadow") or {}, entry.get("answer") or {}
        scores = _scores(entry)
        digests = _digests(entry)
        by_digest = {digest: scores[name] for name, digest in digests.items()}
        beside = _scores(shadow) if shadow else {}
        by_digest |= {digest: beside[name] for name, digest in _digests(shadow).items()}
        return Recorded(
            request_id=str(entry["request_id"]),
            client_request_id=entry.get("client_request_id"),
            policy=f"{entry['policy']}@{entry['policy_hash'][:12]}",
            # Lines of versions that judged no answers have one action.
            action=str(entry.get("prompt_action", entry["action"])),
            rule=entry["rule"],
            reason=entry["reason"],
            assignment=entry.get("assignment"),
            scores=scores,
            digests=digests,
            by_digest=by_digest,
            gates={str(rule): dict(told) for rule, told in entry.get("gates", {}).items()},
            whole_action=str(entry["action"]),
            answers=tuple(map(_answer, [*answer.get("earlier", ()), answer])) if answer else (),
            attempts=int(answer.get("attempts", 0)),
            streamed=bool(entry.get("streamed")),
            contract=None if (told := entry.get("contract")) is None else _contract(told),
            route=str(entry.get("route")),
            outcome=str(entry.get("outcome")),
            way=_text(entry.get("prompt_way")),
            waits=None if (told := entry.get("waits")) is None else Waits(*(_seconds(told[at]) for at in WAITED)),
            prompt_s=_longest_s(entry, "own", "verdict"),
            total_s=_longest_s(entry, "total"),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _seconds(told: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(wait_s) for name, wait_s in told.items()}


def _longest_s(entry: Entry, *names: str) -> float | None:
    timings = entry.get("timings_ms") or {}
    return max((timings[name] / 1000 for name in names if timings.get(name) is not None), default=None)


def _contract(told: Mapping[str, Any]) -> Contract:
    return Contract(told["streaming"], int(told["window_tokens"]))


def _answer(told: Mapping[str, Any]) -> RecordedAnswer:
    whole = {name: Spread().also(score) for name, score in _scores(told).items()}
    whole |= {str(name): _spread(one) for name, one in told.get("over_time", {}).items()}
    complete = told.get("complete")
    return RecordedAnswer(
        action=str(told["action"]),
        rule=told["rule"],
        reason=told["reason"],
        complete=None if complete is None else bool(complete),
        times=None if (times := told.get("times")) is None else int(times),
        whole=whole,
        end=whole | {str(name): _spread(one) for name, one in told.get("at_end", {}).items()},
        digests=_digests(told),
        beside=_answer(shadow) if (shadow := told.get("shadow")) else None,
        way=_text(told.get("way")),
    )


def _text(told: object) -> str | None:
    return None if told is None else str(told)


def _digests(told: Mapping[str, Any]) -> dict[str, str]:
    """What each detector measured, by its name; none in lines of versions that did not write it."""
    return {str(name): str(digest) for name, digest in told.get("measured", {}).items()}


def _spread(told: Mapping[str, Any]) -> Spread:
    lowest, highest = (
        None if told[end] is None else Score("scored", float(told[end])) for end in ("lowest", "highest")
    )
    without = tuple(_score(None, str(status), bool(told["timed_out"])) for status in told["without"])
    return Spread(lowest, highest, without)


def _scores(entry: Mapping[str, Any]) -> dict[str, Score]:
    late = entry.get("timed_out", [])
    return {name: _score(value, str(entry["detectors"][name]), name in late) for name, value in entry["scores"].items()}


def _score(value: float | None, status: str, late: bool) -> Score:
    kind, _, reason = status.partition(": ")
    if kind == "scored" and value is not None:
        return Score("scored", float(value), reason=reason, floor=bool(reason))
    if kind == "not_applicable":
        return Score("not_applicable", reason=reason)
    return Score("unavailable", reason=reason, timed_out=late)
