"""The policies that judge one request: the live one, and a shadow policy beside it that reads the same.

Owns what both ask of the engine together, at no second reading. What the shadow decides is recorded and never done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import ValidationError

from detectors.base import Score
from guard.mia.results import Readouts
from guard.mia.spec import MiaSpec
from guard.mistakes import first_mistake
from guard.policy.bound import BoundPolicy
from guard.policy.conversation import ends_behind_others, means_what_it_says
from guard.policy.engine import Decision
from guard.policy.measuring import (
    PLACED,
    SHADOW_PREFIX,
    Measurement,
    Question,
    Steering,
    Unplaced,
    measurement,
    question,
    with_combined,
)
from guard.policy.schema import LATER, Stage

PROMPT: tuple[Stage, ...] = ("prompt",)
STREAM: tuple[Stage, ...] = ("stream",)


class TooMuchError(ValueError):
    """Live and shadow policy together ask for more than one request can."""


@dataclass(frozen=True)
class Wait:
    """For one detector's score, ``limit_s`` seconds at most. ``acts``: a rule in force of the live policy goes by it,
    and decisions wait for it; ``ends``: one that blocks when it is late."""

    limit_s: float
    acts: bool
    ends: bool


@dataclass(frozen=True)
class Scores:
    """Of one request, by detector, for each of the policies. ``shadow`` is empty without one."""

    live: Mapping[str, Score]
    shadow: Mapping[str, Score]


@dataclass(frozen=True)
class Judges:
    """``measured``: every detector of either policy once. ``beside``: the shadow's detectors by its own names.

    ``settled``: what is asked of every request alike in which a role means itself alone; None where it depends on the
    conversation.
    """

    live: BoundPolicy
    shadow: BoundPolicy | None
    measured: tuple[Measurement, ...]
    beside: Mapping[str, Measurement]
    settled: Question | None

    def ask(self, roles: Sequence[str], unplaced: Unplaced = PLACED) -> Question:
        """What to ask the engine for a conversation of messages with these roles, and what is unplaced in it."""
        if (
            self.settled is not None
            and means_what_it_says(roles)
            and unplaced == PLACED
            and not ends_behind_others(roles)
        ):
            return self.settled
        return self._growing(question(self.measured, roles, self.live.armed, unplaced))

    def ask_alone(self, roles: Sequence[str], reason: str, unplaced: Unplaced = PLACED) -> Question:
        """The same for the live policy alone: what only its shadow measures is unavailable, with ``reason``."""
        asked = self._growing(question(self.live.measurements.values(), roles, self.live.armed, unplaced))
        missing = Score("unavailable", reason=reason)
        return replace(asked, known={**dict.fromkeys(self.only_beside, missing), **asked.known})

    def ask_unread(self, roles: Sequence[str], reason: str, unplaced: Unplaced = PLACED) -> Question:
        """The same where nothing can be read: what the model's inside says is unavailable, with ``reason``."""
        missing = Score("unavailable", reason=reason)
        unread = {one.key: missing for one in self.measured if not one.reads_text}
        return Question(MiaSpec(), {**unread, **self.ask(roles, unplaced).known})

    @property
    def only_beside(self) -> tuple[str, ...]:
        """Keys of the detectors that only the shadow policy has."""
        return tuple(one.key for one in self.measured if one.key.startswith(SHADOW_PREFIX))

    def ask_again(self, roles: Sequence[str], steerings: Sequence[Steering], unplaced: Unplaced = PLACED) -> Question:
        """What to ask of an answer that is generated anew: what its rules and the steerings' gates read, no more."""
        needed = {self.live.measurements[name].key for name in self.live.detectors_of(LATER)}
        if self.shadow is not None:
            needed |= {self.beside[name].key for name in self.shadow.detectors_of(LATER)}
        needed |= {one.reads for one in steerings if one.reads is not None}
        asked = [one for one in self.measured if one.key in needed]
        return self._growing(question(asked, roles, steerings, unplaced))

    def _growing(self, asked: Question) -> Question:
        """The same, with readouts of the answer while it grows where rules judge it meanwhile."""
        return with_progress(asked, self.live, self.shadow)

    @property
    def judges_answers(self) -> bool:
        """Whether either policy has rules for answers."""
        return bool(self.live.rules_of_answers or (self.shadow and self.shadow.rules_of_answers))

    @property
    def cuts_streams(self) -> bool:
        """Whether a rule may end a stream that has begun."""
        return self.live.holds_answers and self.live.streaming != "hold"

    def hold_s(self, asked: Question) -> float:
        """How long an answer is held for scores that the live policy acts on; 0 when there are none to wait for."""
        needed = [self.live.measurements[name] for name in self.live.detectors_of(PROMPT)]
        waits = asked.reads and any(one.key not in asked.known and one.reads_engine for one in needed)
        return self.live.hold_s if waits else 0.0

    def readers(self, stages: tuple[Stage, ...]) -> list[Measurement]:
        """Detectors of either policy that read text, those that the live policy's rules in force use first."""
        known = self._readers.get(stages)
        if known is None:
            found = [one for one in self._measured_in(stages) if one.reads_text]
            known = self._readers[stages] = sorted(found, key=lambda one: not self.wait_for(one, stages).acts)
        return known

    @cached_property
    def _readers(self) -> dict[tuple[Stage, ...], list[Measurement]]:
        return {}

    def wait_for(self, one: Measurement, stages: tuple[Stage, ...]) -> Wait:
        """How long a detector's score is waited for at these stages, and whether a decision is."""
        known = self._waits.get((one.key, stages))
        if known is None:
            known = self._waits[one.key, stages] = self._wait_for(one.key, stages)
        return known

    @cached_property
    def _waits(self) -> dict[tuple[str, tuple[Stage, ...]], Wait]:
        return {}

    def _wait_for(self, key: str, stages: tuple[Stage, ...]) -> Wait:
        if key in self.live.measurements:
            acts_s = self.live.wait_s(key, stages)
            return Wait(acts_s or self.live.prompt_timeout_s, acts_s > 0, self.live.ends_when_late(key, stages))
        assert self.shadow is not None, "the detector is of one of them"
        return Wait(self.shadow.prompt_timeout_s, acts=False, ends=False)

    def asking_again(self, asked: Question) -> list[Measurement]:
        """Detectors of answers that have the model read something more, and apply to this request."""
        found = [one for one in self._measured_in(LATER) if one.asks_again and one.key not in asked.known]
        return sorted(found, key=lambda one: not self.wait_for(one, LATER).acts)

    @cached_property
    def windowed(self) -> list[Measurement]:
        """Detectors that have the model read a long prompt once more, in windows."""
        return [one for one in self._measured_in(PROMPT) if one.windows is not None]

    def growing(self) -> list[Measurement]:
        """Detectors that judge what an answer's tokens have in them while it grows."""
        return [one for one in self._measured_in(STREAM) if one.reads_answer]

    def scores(
        self,
        asked: Question,
        readouts: Readouts | None,
        reason: str = "",
        *,
        timed_out: bool = False,
        texts: Mapping[str, Score] | None = None,
        stages: Collection[Stage] = PROMPT,
    ) -> Scores:
        """Scores of all detectors that ``stages`` have. None for ``readouts`` makes every score that had to be read
        unavailable, with ``reason``; ``texts`` are the scores of those that read text."""
        live = self.live.detectors_of(stages)
        beside = self.shadow.detectors_of(stages) if self.shadow else frozenset()
        wanted = {name: one for name, one in self.live.measurements.items() if name in live}
        shadow = {name: one for name, one in self.beside.items() if name in beside}
        both = {one.key: one for one in (*wanted.values(), *shadow.values()) if not one.combines}
        by_key = asked.scores(both, readouts, reason, timed_out, texts)

        def named(measured: Mapping[str, Measurement]) -> dict[str, Score]:
            plain = {name: by_key[one.key] for name, one in measured.items() if not one.combines}
            return with_combined(measured, plain, asked.known)

        return Scores(named(wanted), named(shadow))

    def decide(self, scores: Scores, stage: Stage = "prompt") -> tuple[Decision, Decision | None]:
        """The decision, and what the shadow policy would have decided."""
        return (
            self.live.decide(scores.live, stage),
            self.shadow.decide(scores.shadow, stage) if self.shadow else None,
        )

    def _measured_in(self, stages: Collection[Stage]) -> list[Measurement]:
        """Of either policy, each once."""
        live = self.live.detectors_of(stages)
        found = [one for name, one in self.live.measurements.items() if name in live]
        if self.shadow is not None:
            beside = self.shadow.detectors_of(stages)
            found += [one for name, one in self.beside.items() if name in beside]
        return list({one.key: one for one in found}.values())


def judges(live: BoundPolicy, shadow: BoundPolicy | None) -> Judges:
    """A detector that both policies use in the same way is measured once. Raises ``TooMuchError``."""
    shared = {live.digests[name]: one for name, one in live.measurements.items()}
    beside = {} if shadow is None else _beside(shadow, shared)
    measured = tuple({one.key: one for one in (*live.measurements.values(), *beside.values())}.values())
    try:
        whole = question(measured, None, live.armed)
    except ValidationError as error:
        reason = first_mistake(error)[1]
        named = f"{live.name} with {shadow.name} beside it asks" if shadow else f"{live.name} asks"
        raise TooMuchError(f"{named} for more than one request can: {reason}") from None
    depends = any(one.depends_on_conversation for one in measured)
    return Judges(live, shadow, measured, beside, None if depends else with_progress(whole, live, shadow))


def with_progress(asked: Question, live: BoundPolicy, shadow: BoundPolicy | None) -> Question:
    """The question with ``progress_tokens`` of the policy that wants to know sooner."""
    wanted = [one.progress_tokens for one in (live, shadow) if one is not None and one.progress_tokens is not None]
    if not wanted:
        return asked
    return replace(asked, spec=asked.spec.model_copy(update={"progress_tokens": min(wanted)}))


def _beside(shadow: BoundPolicy, shared: Mapping[str, Measurement]) -> dict[str, Measurement]:
    # A combination is not shared: its inputs have the names of its own policy.
    return {
        name: (shared.get(shadow.digests[name]) if not use.inputs else None)
        or measurement(f"{SHADOW_PREFIX}{name}", shadow.detectors[name], use, use.inputs)
        for name, use in shadow.uses.items()
    }
