"""What a policy lets the guard keep of the texts of its requests. Owns that section of a policy file."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from guard.linear_pattern import linear_pattern
from guard.policy.conditions import Section

Redacted = Literal["secrets", "emails", "cards"]
PatternName = Annotated[str, Field(pattern=r"^[a-z0-9_\-]{1,32}$")]


class Capture(Section):
    """Text that is kept of the requests that the policy judges: in files beside the ledger, never in it, in metrics, in
    traces or in logs. Without this section nothing is kept. A shadow policy's does not count."""

    prompt: bool = False
    """The texts that the client sent, as they came."""

    answer: bool = False
    """What the client got, and of an answer that a rule blocked or had made anew what was judged."""

    redact: tuple[Redacted, ...] = ("secrets", "emails", "cards")
    """What is taken out before anything is written. `secrets`: keys, tokens and passwords by the forms of well-known
    services and by what stands before them; `emails`; `cards`: numbers of payment cards whose check digit is right.
    Found as they are usually written: who spells one out, splits it over messages or splits a word of it over parts of
    one, has it kept, and of a passphrase of several words that is not quoted all but the first."""

    patterns: Annotated[dict[PatternName, str], Field(max_length=32, examples=[{"ticket": "ACME-[0-9]{6}"}])] = {}  # noqa: RUF012 - pydantic copies it
    """Regular expressions of what else is taken out, each by the name that stands there instead, in brackets: in RE2's
    syntax, which has no look-around and no back-references, and takes time in proportion to any text."""

    retention_days: Annotated[int, Field(ge=1, le=3650)] = 7
    """Whole days after which the text is deleted, counted from the day of the request, UTC. What was kept already stays
    as long as was said then."""

    @field_validator("patterns")
    @classmethod
    def _are_patterns(cls, value: dict[str, str]) -> dict[str, str]:
        for name, pattern in value.items():
            try:
                compiled = linear_pattern(pattern)
            except ValueError as error:
                raise ValueError(f"{name} is no regular expression that RE2 takes: {error}") from None
            if compiled.fullmatch(""):
                raise ValueError(f"{name} matches nothing at all, everywhere")
        return value

    @model_validator(mode="after")
    def _keeps_something(self) -> Self:
        if not self.prompt and not self.answer:
            raise ValueError("keeps nothing: prompt, answer or both must be true")
        return self
