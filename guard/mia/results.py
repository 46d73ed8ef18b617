"""What one request gets back: readouts by capture name, each with a status, and their wire form.

Owns the JSON that the API server adds to an answer. Never touches torch or vLLM. A readout that is not ``complete``
says why; a consumer must treat it as "no score", never as "clean". Positions count from the prompt's first token on
through the generated ones; token_ids are the tokens there, so that a consumer can check.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pybase64
from pydantic import Field, PlainSerializer, PlainValidator, SerializationInfo, TypeAdapter

from guard.mia.spec import AttentionCapture, Capture, HiddenCapture, ProbeCapture, QKCapture, generates

FloatArray = npt.NDArray[np.float32]
Status = Literal["complete", "dropped", "unavailable"]
Stage = Literal["prompt", "progress", "final"]
Heads = tuple[tuple[int, int], ...]

EVENT_OBJECT = "mia.readouts"
"""Value of ``object`` in the extra chunk of a stream."""

SHORT_CHARACTERS = 256

_LITTLE_ENDIAN = np.dtype("<f4")

RAW = "raw"
"""Serialization context between processes: bytes as they are, where JSON has base64."""


def array_to_wire(values: FloatArray, info: SerializationInfo) -> dict[str, Any]:
    """float32, little endian, base64: a tenth of the size and time of a JSON list of floats."""
    raw = np.ascontiguousarray(values, dtype="<f4").tobytes()
    data = raw if info.context == RAW else pybase64.b64encode_as_string(raw)
    return {"dtype": "float32", "shape": list(values.shape), "data": data}


def array_from_wire(wire: Any) -> FloatArray:
    """Inverse of ``array_to_wire``, either context. Raises ``KeyError`` or ``ValueError`` on anything else."""
    if not isinstance(wire, dict) or wire["dtype"] != "float32":
        raise ValueError("not an array of dtype float32")
    data = wire["data"]
    raw = data if isinstance(data, bytes) else _bytes_of(data)
    return np.frombuffer(raw, _LITTLE_ENDIAN).reshape(wire["shape"])


def _bytes_of(data: str) -> bytes:
    # Most arrays are a few numbers; pybase64 starts more slowly and lets go of the interpreter's lock.
    if len(data) > SHORT_CHARACTERS:
        return pybase64.b64decode(data, validate=True)
    return binascii.a2b_base64(data, strict_mode=True)


Array = Annotated[FloatArray, PlainValidator(array_from_wire), PlainSerializer(array_to_wire)]


@dataclass(frozen=True)
class HiddenReadout:
    """One residual-stream vector. ``values``: ``[hidden_size]`` float32, None unless complete."""

    status: Status
    layer: int
    position: int | None = None
    token_id: int | None = None
    values: Array | None = None
    reason: str = ""
    kind: Literal["hidden"] = "hidden"


@dataclass(frozen=True)
class RowsReadout:
    """Residual-stream vectors of several tokens, in the order of the text.

    values: ``[len(positions), hidden_size]`` float32, None unless complete; without a token ``[0, hidden_size]``.
    """

    status: Status
    layer: int
    positions: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    values: Array | None = None
    reason: str = ""
    kind: Literal["rows"] = "rows"


@dataclass(frozen=True)
class HiddenMeanReadout:
    """The mean of the residual-stream vectors of several tokens: those of the ranges [start, end) in ``tokens``.

    values: ``[hidden_size]`` float32, None unless complete and of a token.
    """

    status: Status
    layer: int
    tokens: tuple[tuple[int, int], ...] = ()
    values: Array | None = None
    reason: str = ""
    kind: Literal["hidden_mean"] = "hidden_mean"


@dataclass(frozen=True)
class ProbeReadout:
    """A probe's logits. ``logits``: ``[len(positions), outputs]`` float32, None unless complete and of a token."""

    status: Status
    probe: str
    positions: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logits: Array | None = None
    reason: str = ""
    kind: Literal["probe"] = "probe"


@dataclass(frozen=True)
class AttentionReadout:
    """Attention of chosen heads, in the order of ``heads``, from one token or as the mean over several: ``positions``.

    ``mass[span]``: ``[len(heads)]`` float32 in 0..1. weights: ``[len(heads), prompt tokens]`` float32 when asked for.
    """

    status: Status
    heads: Heads
    positions: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    mass: dict[str, Array] = field(default_factory=dict)
    weights: Array | None = None
    reason: str = ""
    kind: Literal["attention"] = "attention"


@dataclass(frozen=True)
class AttentionRowsReadout:
    """Attention of chosen heads from each of several tokens.

    ``mass[span]``: ``[len(positions), len(heads)]`` float32 in 0..1. weights: ``[len(positions), len(heads), tokens]``
    float32 when asked for; tokens are those of prompt and answer up to the last position.
    """

    status: Status
    heads: Heads
    positions: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    mass: dict[str, Array] = field(default_factory=dict)
    weights: Array | None = None
    reason: str = ""
    kind: Literal["attention_rows"] = "attention_rows"


@dataclass(frozen=True)
class QKReadout:
    """Raw queries and keys of chosen heads, by layer, after rotary embedding and norms.

    ``queries[layer]``: ``[len(positions), heads of that layer in the order asked, head_size]`` float32.
    ``keys[layer]``: ``[tokens from the first on, len(kv_heads[layer]), head_size]`` float32.
    ``group[layer]``: query heads that share a key head. The model's attention is the softmax of ``scale q.k``, passed
    through ``softcap tanh(x / softcap)`` unless softcap is 0, over the last ``window`` tokens unless that is None.
    """

    status: Status
    heads: Heads
    positions: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    queries: dict[int, Array] = field(default_factory=dict)
    keys: dict[int, Array] = field(default_factory=dict)
    kv_heads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    group: dict[int, int] = field(default_factory=dict)
    scale: dict[int, float] = field(default_factory=dict)
    softcap: dict[int, float] = field(default_factory=dict)
    window: dict[int, int | None] = field(default_factory=dict)
    reason: str = ""
    kind: Literal["qk"] = "qk"


Readout = (
    HiddenReadout | RowsReadout | HiddenMeanReadout | ProbeReadout | AttentionReadout | AttentionRowsReadout | QKReadout
)


@dataclass(frozen=True)
class SteeringReport:
    """What one steering of a request did up to now.

    steered_tokens: tokens that it changed. relative_dose: the largest ``|change| / |stream|`` that it asked for, over
    tokens. limited_tokens: those whose change the engine's ``max_relative_dose`` shortened. opened_at: position of the
    first token that its gate let it change; None while it is shut, or when there is no gate. reason: why its gate
    cannot open any more, or nothing.
    """

    steered_tokens: int = 0
    relative_dose: float = 0.0
    limited_tokens: int = 0
    opened_at: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Readouts:
    """Readouts of one choice at one stage: ``prompt`` once the prompt was read, ``final`` when the answer ended, and
    between them ``progress`` where the spec asks for it: rows that have come since the last time.

    ``span_tokens``: the resolved token ranges of the named spans. ``steering``: at the final stage, a report for each
    steering in the order of the spec.
    """

    items: dict[str, Annotated[Readout, Field(discriminator="kind")]]
    span_tokens: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    prompt_tokens: int = 0
    prompt_index: int = 0
    choice_index: int = 0
    stage: Stage = "prompt"
    steering: tuple[SteeringReport, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = _readouts.dump_python(self, mode="json")
        return wire

    @classmethod
    def from_wire(cls, wire: Any) -> Readouts:
        """Inverse of ``to_wire``. Raises ``KeyError`` or ``ValueError`` on anything else."""
        return _readouts.validate_python(wire)


_readouts = TypeAdapter(Readouts)

R = TypeVar("R", RowsReadout, ProbeReadout, AttentionRowsReadout, QKReadout)


def with_token_ids(item: Readout, token_ids: Sequence[int]) -> Readout:
    """The readout with the tokens at its positions, where it has any. token_ids: those of prompt and answer, in
    order."""
    if isinstance(item, HiddenMeanReadout):
        return item
    if isinstance(item, HiddenReadout):
        return item if item.position is None else replace(item, token_id=token_ids[item.position])
    return replace(item, token_ids=tuple(token_ids[position] for position in item.positions))


def join(parts: Sequence[R]) -> R:
    """Rows that came one after the other, as one readout. Any part that is not complete makes the whole so."""
    first = parts[0]
    for part in parts:
        if part.status != "complete":
            return part
    positions = tuple(position for part in parts for position in part.positions)

    def joined(values: Callable[[R], FloatArray | None]) -> FloatArray | None:
        arrays = [array for part in parts if (array := values(part)) is not None]
        return np.concatenate(arrays) if arrays else None

    def joined_by_key(arrays: Callable[[R], Mapping[Any, FloatArray]]) -> dict[Any, FloatArray]:
        return {key: np.concatenate([arrays(part)[key] for part in parts]) for key in arrays(first)}

    if isinstance(first, RowsReadout):
        return replace(first, positions=positions, values=joined(lambda part: part.values))
    if isinstance(first, ProbeReadout):
        return replace(first, positions=positions, logits=joined(lambda part: part.logits))
    if isinstance(first, QKReadout):
        queries = joined_by_key(lambda part: part.queries)
        return replace(first, positions=positions, queries=queries, keys=joined_by_key(lambda part: part.keys))
    mass = joined_by_key(lambda part: part.mass)
    return replace(first, positions=positions, mass=mass, weights=_joined_weights(parts))


def _joined_weights(parts: Sequence[AttentionRowsReadout]) -> FloatArray | None:
    """Weights over a growing text: a later token attends to more, so earlier rows end in zeros."""
    weights = [part.weights for part in parts if part.weights is not None]
    if not weights:
        return None
    tokens = max(one.shape[2] for one in weights)
    return np.concatenate([np.pad(one, ((0, 0), (0, 0), (0, tokens - one.shape[2]))) for one in weights])


def arrays(item: Readout) -> Iterator[tuple[str, Any, FloatArray]]:
    """Field, key where the field is a dict, and array of every array in one readout, whatever its kind."""
    for one in fields(item):
        value = getattr(item, one.name)
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else [(None, value)]
        for key, array in pairs:
            if isinstance(array, np.ndarray):
                yield one.name, key, array


def size_bytes(item: Readout) -> int:
    """Of a readout's arrays."""
    return sum(array.nbytes for _, _, array in arrays(item))


def empty(capture: Capture, hidden_size: int) -> Readout:
    """The complete readout of a capture that no token was read for, such as an answer's of one token."""
    item = not_complete(capture, "complete", "")
    return replace(item, values=np.zeros((0, hidden_size), np.float32)) if isinstance(item, RowsReadout) else item


def not_complete(capture: Capture, status: Status, reason: str) -> Readout:
    """The readout of a capture without any values, and why."""
    if isinstance(capture, HiddenCapture):
        if capture.average:
            return HiddenMeanReadout(status, capture.layer, reason=reason)
        if capture.positions == "last_prompt":
            return HiddenReadout(status, capture.layer, reason=reason)
        return RowsReadout(status, capture.layer, reason=reason)
    if isinstance(capture, ProbeCapture):
        return ProbeReadout(status, capture.probe, reason=reason)
    if isinstance(capture, QKCapture):
        return QKReadout(status, capture.heads, reason=reason)
    if is_averaged(capture):
        return AttentionReadout(status, capture.heads, reason=reason)
    return AttentionRowsReadout(status, capture.heads, reason=reason)


def is_averaged(capture: Capture) -> bool:
    """Whether an attention capture gives one distribution a head, as the mean over its tokens."""
    return isinstance(capture, AttentionCapture) and not generates(capture)
