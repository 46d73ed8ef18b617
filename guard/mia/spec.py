"""What one request may ask of the aperture: captures on named spans, and steering.

Owns the request's wire form, one JSON string in ``vllm_xargs["mia"]`` (HTTP) or ``extra_args["mia"]`` (offline), and
its limits. Never touches torch or vLLM, so that proxies and detectors import it cheaply. What the running engine has
taps for is checked elsewhere (``guard.mia.engine_config``); here only what any engine would refuse is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from guard.mistakes import told

MAX_SPEC_BYTES = 64 * 1024
"""Longest accepted JSON text of one spec."""

KNOWN_SPECS, MAX_KNOWN_CHARS = 256, 8 * 1024
"""So many texts are remembered with what they say, none longer than that."""

MAX_CAPTURES = 256
"""Most captures, of all kinds together, that one request may name."""

MAX_RANGES = 256
"""Most token ranges that one span may have."""

MAX_HEADS = 16384
"""Most heads that one capture may name."""

MAX_STEERINGS = 1024
"""Most steerings that one request may name, over all layers."""

FOREIGN_KEYS = frozenset({"output_hidden_states", "output_qk", "steer"})
"""Keys of ``vllm_xargs`` beside ``mia`` that ask an engine which plays MIA's part for something."""

MAX_VECTORS_PER_LAYER = 4
"""Most steering vectors that one request may add after one layer."""

SELECTOR = re.compile(
    r"(?:message\.(?P<index>-?\d{1,6})|(?P<role>[a-z_]{1,32})(?:\.(?P<which>all|first|last))?)"
    r"(?:\.part\.(?P<part>-?\d{1,6}))?"
)

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
Name = Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
Layer = Annotated[int, Field(ge=0, le=1024, strict=True)]
Head = tuple[Annotated[int, Field(ge=1, le=1024, strict=True)], Annotated[int, Field(ge=0, le=1024, strict=True)]]
"""``(layer, head)``: layers count blocks from 1, as ``hidden_states[i]`` of transformers does; heads from 0."""


class _FieldError(ValueError):
    """What a check over several fields finds, at ``path`` below the object that it checks."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


class SpecError(ValueError):
    """A spec that no engine accepts. ``param`` is the dotted path of the offending field, below ``mia``."""

    def __init__(self, message: str, param: str = "mia") -> None:
        super().__init__(message)
        self.param = param


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TokenRanges(_Model):
    """Token ranges of the final prompt, half open, counted from 0."""

    tokens: Annotated[tuple[tuple[StrictInt, StrictInt], ...], Field(min_length=1, max_length=MAX_RANGES)]

    @field_validator("tokens")
    @classmethod
    def _ordered(cls, value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        for start, end in value:
            if not 0 <= start < end:
                raise ValueError(f"a token range is [start, end) with 0 <= start < end, not [{start}, {end})")
        return value


class SpanPositions(_Model):
    """Every token of a named span."""

    span: Name


class FirstGenerated(_Model):
    """The first so many generated tokens."""

    generated: Annotated[int, Field(ge=1, le=4096, strict=True)]


def _form(value: Any) -> str:
    """Which of the ways to say positions or a span a value is, so that an error is about that one."""
    if isinstance(value, TokenRanges | SpanPositions | FirstGenerated):
        return {TokenRanges: IN_TOKENS, SpanPositions: IN_SPAN, FirstGenerated: IN_GENERATED}[type(value)]
    if isinstance(value, dict):
        return IN_SPAN if "span" in value else IN_GENERATED if "generated" in value else IN_TOKENS
    return IN_WORDS


IN_WORDS, IN_TOKENS, IN_SPAN, IN_GENERATED = "(words)", "(tokens)", "(span)", "(generated)"
"""Forms. Pydantic puts them into an error's path, where nobody has written them."""

FORMS = frozenset({IN_WORDS, IN_TOKENS, IN_SPAN, IN_GENERATED})

_Tokens = Annotated[TokenRanges, Tag(IN_TOKENS)]
_Span = Annotated[SpanPositions, Tag(IN_SPAN)]
_by_form = Discriminator(
    _form, "form", 'cannot be said in this way: here it is words, {"tokens": ...} or {"span": ...}'
)

Positions = Annotated[
    Annotated[Literal["last_prompt", "prompt", "generated", "all"], Tag(IN_WORDS)] | _Tokens | _Span, _by_form
]
"""Which tokens are read: the last of the prompt, all of it, each generated one, both, token ranges of the prompt, or a
span. The last generated token is never fed to the model, so it has no row."""


class HiddenCapture(_Model):
    """The full residual stream (hidden + residual) after one block, at ``positions``.

    ``layer`` is the index into transformers' ``hidden_states``: 0 is the embedding, i the output of block i.
    """

    layer: Layer
    positions: Positions = "last_prompt"
    average: bool = False
    """Of tokens of the prompt, their mean: one vector leaves the engine however many they are."""

    @model_validator(mode="after")
    def _only_prompts_are_averaged(self) -> Self:
        if self.average and self.positions in ("last_prompt", "generated", "all"):
            raise _FieldError("average", "is of several tokens of the prompt: positions prompt, a span or token ranges")
        return self


class ProbeCapture(_Model):
    """The logits of a probe that the engine was started with, at ``positions``; the states themselves stay inside."""

    probe: Name
    positions: Positions = "last_prompt"


class AttentionCapture(_Model):
    """How much attention each of ``heads`` puts on each of ``spans``: the sum of its probabilities there.

    ``positions`` says from which tokens: the prompt's last; the mean over a span or over token ranges; or each
    generated one, or the first so many, which gives a row for each. With ``weights`` the probabilities of all tokens up
    to there come back too; then ``spans`` may be empty.
    """

    heads: Annotated[tuple[Head, ...], Field(min_length=1, max_length=MAX_HEADS)]
    spans: Annotated[tuple[Name, ...], Field(max_length=16)] = ()
    weights: bool = False
    positions: Annotated[
        Annotated[Literal["last_prompt", "generated"], Tag(IN_WORDS)]
        | _Tokens
        | _Span
        | Annotated[FirstGenerated, Tag(IN_GENERATED)],
        _by_form,
    ] = "last_prompt"


class QKCapture(_Model):
    """Raw queries of ``heads`` at ``positions``, and the keys of their key heads at every token up to the last.

    Both as the attention multiplies them: after rotary embedding and norms.
    """

    heads: Annotated[tuple[Head, ...], Field(min_length=1, max_length=MAX_HEADS)]
    positions: Positions = "last_prompt"


Capture = HiddenCapture | ProbeCapture | AttentionCapture | QKCapture


def generates(capture: Capture) -> bool:
    """Whether a capture's rows come while the answer is generated."""
    return capture.positions in ("generated", "all") or isinstance(capture.positions, FirstGenerated)


def span_of(capture: Capture) -> tuple[str, ...]:
    """The span that says at which tokens a capture reads, if one does."""
    return (capture.positions.span,) if isinstance(capture.positions, SpanPositions) else ()


Deliver = Literal["answer", "safetensors", "pt"]

SteeringMethod = Literal["add_vector", "project", "ablate", "replace"]

Selector = Annotated[str, Field(max_length=64)]
Span = Annotated[_Tokens | Annotated[tuple[Selector, ...], Field(min_length=1, max_length=16), Tag(IN_WORDS)], _by_form]
"""Token ranges, or message selectors whose texts are joined: ``system``, ``user.last``, ``tool``, ``message.3``.

A bare role means all messages of that role. ``message.-1`` counts from the end. ``.part.N`` behind either takes the Nth
part of contents that are lists of parts: ``user.last.part.0``."""


class Gate(_Model):
    """Holds a steering back until a readout of the same request crosses a threshold; then it acts to the end.

    Decided inside the engine after every step: the first token that can be steered is the one after the crossing.
    """

    readout: Name
    """Name of a probe or attention capture of this request. Each of its rows is compared as it comes; of a probe with
    several outputs the first counts."""

    span: Name | None = None
    """For attention: which span's mass, as the mean over the capture's heads."""

    above: Annotated[float | None, Field(allow_inf_nan=False)] = None
    """Opens when the readout is greater than this."""

    below: Annotated[float | None, Field(allow_inf_nan=False)] = None
    """Opens when the readout is less than this."""

    @model_validator(mode="after")
    def _one_threshold(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("a gate has either above or below")
        return self

    def opens(self, value: float) -> bool:
        return value > self.above if self.above is not None else value < (self.below or 0.0)


class Steer(_Model):
    """Change the full residual stream (hidden + residual) after block ``layer``, at chosen tokens.

    With the stream s, the vector v and its unit vector u, ``add_vector`` gives s + c v; ``project`` s + c (t - s.u) u,
    which brings the projection on u to the target t; ``ablate`` s - c (s.u) u, which takes it out; ``replace`` c v.
    """

    vector: Name
    """Name of a vector that the engine was started with."""

    layer: Annotated[int, Field(ge=1, le=1024, strict=True)]
    """After which block, counted from 1."""

    coefficient: Annotated[float, Field(ge=-1e4, le=1e4, allow_inf_nan=False)]
    """c above; 0 changes nothing at all, whatever the method."""

    method: SteeringMethod = "add_vector"
    """How the vector acts."""

    target: Annotated[float | None, Field(ge=-1e6, le=1e6, allow_inf_nan=False)] = None
    """t above; needed for `project`, and for it only."""

    preserve_norm: bool = False
    """Scale the result to the length that the stream had before."""

    phase: Literal["prefill", "decode", "both"] = "both"
    """At which tokens: those of the prompt, those that are generated, or all."""

    positions: Annotated[Annotated[Literal["all", "last"], Tag(IN_WORDS)] | _Tokens, _by_form] = "all"
    """Which of them: all; of the prompt only the last (generated ones are each the last when they come); or ranges of
    tokens, counted from the prompt's first on through the generated ones."""

    gate: Gate | None = None
    """Acts only once this has opened; then `phase` must be `decode`, so that how a prompt was cut into steps does not
    matter."""

    @model_validator(mode="after")
    def _target_belongs_to_project(self) -> Self:
        if (self.method == "project") != (self.target is not None):
            raise ValueError("method project needs a target, and only it has one")
        return self

    @model_validator(mode="after")
    def _gates_hold_back_generated_tokens(self) -> Self:
        if self.gate is not None and self.phase != "decode":
            raise ValueError("a gated steering has phase decode")
        return self


def one_selector_is_a_list_of_one(value: Any) -> Any:
    """Spans as people write them: a single selector needs no list."""
    if isinstance(value, dict):
        return {name: (span,) if isinstance(span, str) else span for name, span in value.items()}
    return value


def check_selectors(name: str, selectors: tuple[str, ...]) -> None:
    """Raise ``ValueError`` for a span's first selector that is none."""
    for selector in selectors:
        if not SELECTOR.fullmatch(selector):
            raise ValueError(
                f"span {name!r}: {selector!r} is not a selector; use ROLE, ROLE.first, ROLE.last or message.N"
            )


class MiaSpec(_Model):
    """Everything one request asks of the aperture. Names of captures are the keys of the readouts that come back."""

    spans: Annotated[dict[Name, Span], Field(max_length=16)] = {}
    hidden: dict[Name, HiddenCapture] = {}
    probes: dict[Name, ProbeCapture] = {}
    attention: dict[Name, AttentionCapture] = {}
    qk: dict[Name, QKCapture] = {}
    steer: Annotated[tuple[Steer, ...], Field(max_length=MAX_STEERINGS)] = ()
    deliver: Deliver = "answer"
    """Where values go: into the answer, or into files of the server's artifact folder; the answer then names them."""
    progress_tokens: Annotated[int | None, Field(ge=1, le=4096, strict=True)] = None
    """In a stream, what grows with the answer is also sent while it grows, each time that so many more tokens were
    read. At the end it comes whole all the same."""

    _one_selector = field_validator("spans", mode="before")(one_selector_is_a_list_of_one)

    @field_validator("spans")
    @classmethod
    def _selectors_parse(cls, value: dict[str, Span]) -> dict[str, Span]:
        for name, span in value.items():
            if isinstance(span, tuple):
                try:
                    check_selectors(name, span)
                except ValueError as error:
                    raise _FieldError(name, str(error)) from None
        return value

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        names = Counter([*self.hidden, *self.probes, *self.attention, *self.qk])
        if names.total() > MAX_CAPTURES:
            raise _FieldError("", f"at most {MAX_CAPTURES} captures a request")
        if twice := sorted(name for name, count in names.items() if count > 1):
            kind = next(kind for kind, name, _ in self._captures_by_kind() if name == twice[0])
            raise _FieldError(f"{kind}.{twice[0]}", "a capture's name is used once, over all kinds")
        for kind, name, capture in self._captures_by_kind():
            spans = (*(capture.spans if isinstance(capture, AttentionCapture) else ()), *span_of(capture))
            if missing := set(spans) - self.spans.keys():
                raise _FieldError(f"{kind}.{name}", f"undefined spans: {', '.join(sorted(missing))}")
        for kind, name, capture in self._captures_by_kind():
            if isinstance(capture, AttentionCapture | QKCapture) and len(set(capture.heads)) < len(capture.heads):
                raise _FieldError(f"{kind}.{name}.heads", "a head is named once")
        for name, attention in self.attention.items():
            if not (attention.spans or attention.weights):
                raise _FieldError(f"attention.{name}", "names no spans and does not ask for weights")
        for i, steer in enumerate(self.steer):
            if steer.gate is not None:
                self._check_gate(f"steer.{i}.gate", steer.gate)
        for layer, vectors in Counter(steer.layer for steer in self.steer).items():
            if vectors > MAX_VECTORS_PER_LAYER:
                raise _FieldError("steer", f"{vectors} vectors at layer {layer}; at most {MAX_VECTORS_PER_LAYER}")
        return self

    def _captures_by_kind(self) -> Iterator[tuple[str, str, Capture]]:
        for kind in ("hidden", "probes", "attention", "qk"):
            for name, capture in getattr(self, kind).items():
                yield kind, name, capture

    def _check_gate(self, where: str, gate: Gate) -> None:
        if gate.readout in self.attention:
            if gate.span not in self.attention[gate.readout].spans:
                raise _FieldError(f"{where}.span", f"not a span of attention.{gate.readout}: {gate.span!r}")
        elif gate.readout not in self.probes or gate.span is not None:
            raise _FieldError(f"{where}.readout", f"{gate.readout!r} is no probe, nor attention with a span")

    @property
    def captures(self) -> dict[str, Capture]:
        """All captures by name."""
        return {name: capture for _, name, capture in self._captures_by_kind()}

    @property
    def asks(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.captures or self.steer)

    @classmethod
    def from_wire(cls, text: str) -> MiaSpec:
        """Inverse of ``to_wire`` for a spec that was checked before, of any size. ``parse_spec`` is for clients'."""
        return _validate_known(text) if len(text) <= MAX_KNOWN_CHARS else cls.model_validate_json(text)

    @property
    def needs_messages(self) -> bool:
        """Whether a span is named by message and must be resolved through the chat template."""
        return any(isinstance(span, tuple) for span in self.spans.values())

    def to_wire(self) -> str:
        """The JSON text that goes into ``vllm_xargs["mia"]``."""
        return self.model_dump_json(exclude_defaults=True)


def parse_spec(text: object) -> MiaSpec:
    """Parse the wire form. Raises ``SpecError`` that names the first offending field; never another exception."""
    if not isinstance(text, str):
        raise SpecError(f"must be a JSON string, not {type(text).__name__}")
    if len(text) <= MAX_KNOWN_CHARS:
        return _parse_known(text)
    if len(text.encode(errors="replace")) > MAX_SPEC_BYTES:
        raise SpecError(f"longer than {MAX_SPEC_BYTES} bytes")
    return _parse(text)


def _parse(text: str) -> MiaSpec:
    try:
        json.loads(text, object_pairs_hook=_once_each)
    except _FieldError as error:
        raise SpecError(str(error)) from None
    except (ValueError, RecursionError):
        pass  # not JSON, which the next line says better
    try:
        return MiaSpec.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        found_by_check = first.get("ctx", {}).get("error")
        below = (
            found_by_check.path.split(".") if isinstance(found_by_check, _FieldError) and found_by_check.path else []
        )
        path = ".".join(["mia", *(str(part) for part in first["loc"] if part not in FORMS), *below])
        raise SpecError(f"{path}: {told(first)}", path) from None


# Requests under one policy bring the same text, and nothing changes a spec.
_parse_known = lru_cache(KNOWN_SPECS)(_parse)
_validate_known = lru_cache(KNOWN_SPECS)(MiaSpec.model_validate_json)


def _once_each(pairs: list[tuple[str, Any]]) -> None:
    """Of a key that is written twice nobody knows which value was meant. Raises ``_FieldError``."""
    if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
        raise _FieldError("", f"the key {twice[0][:64]!r} is written twice")
