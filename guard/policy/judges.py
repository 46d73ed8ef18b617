"""The policies that judge one request: the live one, and a shadow policy beside it that reads the same prompt.

Owns what both ask of the engine together, at no second reading. What the shadow decides is recorded and never done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from detectors.base import Score
from guard.mia.results import Readouts
from guard.policy.bound import BoundPolicy
from guard.policy.engine import Decision
from guard.policy.measuring import Measurement, Question, measurement, question

SHADOW_PREFIX = "."
"""Before the key of a detector that only the shadow policy has: no detector's own name begins so."""


class TooMuchError(ValueError):
    """Live and shadow policy together ask for more than one request can."""


@dataclass(frozen=True)
class Scores:
    """Of one request, by detector, for each of the policies. ``shadow`` is empty without one."""

    live: Mapping[str, Score]
    shadow: Mapping[str, Score]


@dataclass(frozen=True)
class Judges:
    """``measured``: every detector of either policy once. ``beside``: the shadow's detectors by its own names.

    ``settled``: what is asked of every request alike; None where it depends on the conversation.
    """

    live: BoundPolicy
    shadow: BoundPolicy | None
    measured: tuple[Measurement, ...]
    beside: Mapping[str, Measurement]
    settled: Question | None

    def ask(self, roles: Sequence[str]) -> Question:
        """What to ask the engine for a conversation of messages with these roles."""
        return self.settled or question(self.measured, roles, self.live.armed)

    def ask_alone(self, roles: Sequence[str], reason: str) -> Question:
        """The same for the live policy alone: what only its shadow measures is unavailable, with ``reason``."""
        asked = question(self.live.measurements.values(), roles, self.live.armed)
        missing = Score("unavailable", reason=reason)
        return replace(asked, known={**dict.fromkeys(self.only_beside, missing), **asked.known})

    @property
    def only_beside(self) -> tuple[str, ...]:
        """Keys of the detectors that only the shadow policy has."""
        return tuple(one.key for one in self.measured if one.key.startswith(SHADOW_PREFIX))

    def hold_s(self, asked: Question) -> float:
        """How long an answer is held for scores that the live policy acts on; 0 when there are none to wait for."""
        waits = asked.reads and any(one.key not in asked.known for one in self.live.measurements.values())
        return self.live.hold_s if waits else 0.0

    def scores(
        self, asked: Question, readouts: Readouts | None, reason: str = "", *, timed_out: bool = False
    ) -> Scores:
        """None for ``readouts`` makes every score that had to be read unavailable, with ``reason``."""
        by_key = asked.scores({one.key: one for one in self.measured}, readouts, reason, timed_out)
        return Scores(
            {name: by_key[one.key] for name, one in self.live.measurements.items()},
            {name: by_key[one.key] for name, one in self.beside.items()},
        )

    def decide(self, scores: Scores) -> tuple[Decision, Decision | None]:
        """The decision, and what the shadow policy would have decided."""
        return self.live.decide(scores.live), self.shadow.decide(scores.shadow) if self.shadow else None


def judges(live: BoundPolicy, shadow: BoundPolicy | None) -> Judges:
    """A detector that both policies use in the same way is measured once. Raises ``TooMuchError``."""
    shared = {live.digests[name]: one for name, one in live.measurements.items()}
    beside = {} if shadow is None else _beside(shadow, shared)
    measured = tuple({one.key: one for one in (*live.measurements.values(), *beside.values())}.values())
    try:
        whole = question(measured, None, live.armed)
    except ValidationError as error:
        reason = str(error.errors(include_url=False, include_input=False)[0]["msg"])
        named = f"{live.name} with {shadow.name} beside it asks" if shadow else f"{live.name} asks"
        raise TooMuchError(f"{named} for more than one request can: {reason}") from None
    depends = any(one.depends_on_conversation for one in measured)
    return Judges(live, shadow, measured, beside, None if depends else whole)


def _beside(shadow: BoundPolicy, shared: Mapping[str, Measurement]) -> dict[str, Measurement]:
    return {
        name: shared.get(shadow.digests[name]) or measurement(f"{SHADOW_PREFIX}{name}", shadow.detectors[name], use)
        for name, use in shadow.uses.items()
    }
