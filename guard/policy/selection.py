"""Which policy judges a request: by API key, tenant, model, route and headers, and for a share of them.

Owns the file ``selection.yaml`` of a folder of policies, and the choice: a pure function of what is known about a
request before its prompt is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from guard.policy.conditions import Section, Version
from guard.policy.judged_paths import route_of
from guard.policy.schema import PolicyName

KeyHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9\-]{1,64}$")]
HeaderValues = dict[HeaderName, tuple[str, ...]]

PLAYGROUND = "console"
"""The assignment that the ledger has for runs of the console's playground; no other may be taken for it."""

UNFIT_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
"""Secrets: nobody writes these into a file."""


class Match(Section):
    """What a request must be like. Every field that is given must fit, each by any of its values."""

    keys: tuple[KeyHash, ...] = ()
    """API keys, as SHA-256 in hex like in the file of keys."""

    tenants: tuple[str, ...] = ()
    """Tenants that keys belong to, by the file of keys. Requests without a key have none."""

    models: Annotated[tuple[str, ...], Field(examples=[["llama-*"]])] = ()
    """Models that clients ask for; `*` and `?` stand for any characters."""

    routes: Annotated[tuple[str, ...], Field(examples=[["/v1/chat/completions"]])] = ()
    """Paths of the API, each as the guard serves it; `/rerank` and `/v2/rerank` mean `/v1/rerank` too, and it them."""

    headers: Annotated[HeaderValues, Field(examples=[{"x-profile": ["strict"]}])] = {}  # noqa: RUF012
    """Request headers, in lower case, and the exact values that fit. Clients choose what they send, so name here only
    what any of them may choose."""

    @field_validator("routes")
    @classmethod
    def _routes_are_judged(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(route_of, value)))

    @field_validator("headers")
    @classmethod
    def _headers_are_no_secrets(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        if unfit := sorted(value.keys() & UNFIT_HEADERS):
            raise ValueError(f"{unfit[0]} holds a secret; match keys instead")
        return value


class Assignment(Section):
    """A policy for the requests that fit. The first assignment that takes a request decides."""

    name: PolicyName
    """Shown in the ledger; unique in the file, and not `console`, which runs of the console's playground have. Another
    name draws other requests for the same `percent`."""

    match: Match = Match()
    """Which requests. Default: all."""

    policy: PolicyName
    """Name of the policy that judges them."""

    shadow: PolicyName | None = None
    """Name of a policy that is judged beside it and does nothing. Default: the file's `shadow`."""

    percent: Annotated[float, Field(ge=0, le=100)] = 100.0
    """Share of the requests that fit; the others go on to the next assignment. More percent keeps those that were in
    it."""

    by: Literal["key", "request"] = "key"
    """What falls into the share as a whole: `key`, all requests of one API key (without keys: each request); `request`,
    each by the id that the proxy gives it."""

    @field_validator("name")
    @classmethod
    def _name_is_not_taken(cls, value: str) -> str:
        if value == PLAYGROUND:
            raise ValueError(f"{PLAYGROUND} is what the ledger calls runs of the console's playground; choose another")
        return value


class Selection(Section):
    """`selection.yaml`: which policy of the folder judges which requests."""

    version: Version
    """Version of this format."""

    default: PolicyName
    """Name of the policy for every request that no assignment takes."""

    shadow: PolicyName | None = None
    """Name of a policy that is judged beside the live one, on the same reading of the prompt, and does nothing: what it
    would have done is in ledger and metrics."""

    assignments: Annotated[tuple[Assignment, ...], Field(max_length=256)] = ()
    """In order."""

    for_keys: tuple[PolicyName, ...] = ()
    """Policies that API keys may have as their own. A key's own policy counts before any assignment."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [one.name for one in self.assignments]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"assignments share a name: {', '.join(twice)}")
        return self

    @property
    def of_keys(self) -> tuple[str, ...]:
        """Policies that a key may have as its own."""
        return tuple(dict.fromkeys((*self.for_keys, self.default)))

    @property
    def headers(self) -> frozenset[str]:
        """Names of those that choose."""
        return frozenset(name for one in self.assignments for name in one.match.headers)

    @property
    def pairs(self) -> tuple[tuple[str, str | None], ...]:
        """Every live policy with the one beside it that a request may get."""
        chosen = [(self.default, self.shadow), *((one.policy, one.shadow or self.shadow) for one in self.assignments)]
        chosen += [(policy, self.shadow) for policy in self.for_keys]
        return tuple(dict.fromkeys(chosen))


@dataclass(frozen=True)
class RequestFacts:
    """What is known about a request before its prompt is read. ``headers``: names in lower case. ``policy``: the one
    that its key has."""

    request_id: str
    route: str
    model: str | None = None
    key_hash: str | None = None
    tenant: str | None = None
    headers: Mapping[str, str] | None = None
    policy: str | None = None


class NoSuchPolicyError(ValueError):
    """A key has a policy that the selection does not allow keys to have."""


@dataclass(frozen=True)
class Choice:
    """Names of the policies. ``assignment``: what chose them; None is the file's default."""

    policy: str
    shadow: str | None
    assignment: str | None


def choose(selection: Selection, facts: RequestFacts) -> Choice:
    """The policy for one request: the same for the same facts, whoever asks and whenever.

    Raises ``NoSuchPolicyError``: never another policy in place of the one that a key was given.
    """
    if facts.policy is not None:
        if facts.policy not in selection.of_keys:
            raise NoSuchPolicyError(f"no policy {facts.policy} for keys; selection.yaml lists them under for_keys")
        return Choice(facts.policy, selection.shadow, None)
    for one in selection.assignments:
        if fits(one.match, facts) and _is_in_share(one, facts):
            return Choice(one.policy, one.shadow or selection.shadow, one.name)
    return Choice(selection.default, selection.shadow, None)


def keys_without_policy(selection: Selection, keys: Mapping[str, str]) -> list[str]:
    """A sentence for each key that gets no answer, as ``choose`` has it. keys: id -> the policy that it has."""
    return [
        f"key {key_id}: each of its requests is a 503: it has the policy {policy}, and keys may have "
        f"{', '.join(selection.of_keys)} (for_keys and default of selection.yaml)"
        for key_id, policy in keys.items()
        if policy not in selection.of_keys
    ]


def fits(match: Match, facts: RequestFacts) -> bool:
    """Whether a request is as ``match`` says."""
    headers = facts.headers or {}
    return (
        (not match.keys or facts.key_hash in match.keys)
        and (not match.tenants or facts.tenant in match.tenants)
        and (not match.routes or facts.route in match.routes)
        and (not match.models or (facts.model is not None and any(_is_like(facts.model, m) for m in match.models)))
        and all(headers.get(name) in values for name, values in match.headers.items())
    )


def _is_like(model: str, pattern: str) -> bool:
    """Only ``*`` and ``?`` stand for others: names of models may have brackets."""
    return fnmatchcase(model, pattern.replace("[", "[[]"))


def _is_in_share(assignment: Assignment, facts: RequestFacts) -> bool:
    drawn_by = facts.key_hash if assignment.by == "key" and facts.key_hash is not None else facts.request_id
    digest = hashlib.sha256(f"{assignment.name}\n{drawn_by}".encode()).digest()
    # 53 bits: exactly what a float holds, so 100 takes all and 0 none.
    return int.from_bytes(digest[:8]) >> 11 < assignment.percent / 100 * 2**53
