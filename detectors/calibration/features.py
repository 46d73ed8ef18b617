"""What the model computes on each row, read through the engine as served traffic will be.

Owns the one pass over the rows: offline with an engine of its own, or over HTTP with one that runs. Which layers, heads
and tokens matter is chosen later, so all are read that the engine has taps for. What was read is kept (see
``feature_store``), so that a run which was stopped goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from detectors.calibration.captures import Extra, plan_captures, spec_of
from detectors.calibration.demands import has_instruction
from detectors.calibration.engine_states import reason_of, state_of, states_of
from detectors.calibration.feature_store import FeatureError, FeatureStore, Plan, Reading
from detectors.calibration.rows import Message, Row
from detectors.calibration.token_states import TokenStates
from detectors.windows import DATA, INSTRUCTION
from guard.mia.results import AttentionReadout, FloatArray, Readouts
from guard.mia.spec import MAX_CAPTURES, MiaSpec

MAX_MODEL_LEN = 4096
"""Tokens of a conversation at most, however many a model takes: memory is reserved for them."""
WINDOW_TOKENS = 32
WINDOW_LAYERS = 6
"""At how many evenly spaced layers every token of the data is read, and the last token at all of them."""
ROWS_AT_ONCE = 32
"""Rows between two times of keeping what was read: so much is lost at most when a run is stopped."""


@dataclass(frozen=True)
class ModelShape:
    layers: int
    heads: int
    hidden_size: int

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.heads} heads and {self.hidden_size} components"


@dataclass(frozen=True)
class Features:
    """All float32. hidden: ``[rows, layers, hidden_size]``, of the last prompt token; mass: ``[rows, heads, 2]``, on
    instruction and data, not a number where a row has no instruction; mean: ``[rows, window layers, hidden_size]``,
    over the data's tokens; tokens: ``[rows]``, how many these are; token_states: where the states of each of them are,
    if they were read."""

    layers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    hidden: FloatArray
    mass: FloatArray
    mean_layers: tuple[int, ...]
    mean: FloatArray
    tokens: FloatArray
    token_states: TokenStates | None = None

    def part(self, index: Any) -> Features:
        """Of the rows at ``index``."""
        return Features(
            self.layers,
            self.heads,
            self.hidden[index],
            self.mass[index],
            self.mean_layers,
            self.mean[index],
            self.tokens[index],
            None if self.token_states is None else self.token_states.part(index),
        )


class Reader(Protocol):
    """An engine that reads conversations, each for what its spec says, and answers as many tokens as are to be read,
    greedily."""

    def read(
        self, conversations: Sequence[Sequence[Message]], specs: Sequence[MiaSpec], answer_tokens: int
    ) -> list[Readouts]: ...


def unread(rows: int) -> Features:
    """Of so many rows, of which no model read anything."""
    nothing = np.zeros((rows, 0, 0), np.float32)
    return Features((), (), nothing, np.zeros((rows, 0, 2), np.float32), (), nothing, np.zeros(rows, np.float32))


def model_shape(model: Path) -> ModelShape:
    """From the model folder's ``config.json``."""
    config = _text_config(model)
    return ModelShape(config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"])


def most_tokens(model: Path) -> int:
    """Of a conversation and its answer that an engine of our own reads: no more than the model's ``config.json`` says
    that it takes."""
    return min(MAX_MODEL_LEN, _text_config(model).get("max_position_embeddings") or MAX_MODEL_LEN)


def _text_config(model: Path) -> dict[str, Any]:
    """Multimodal models keep theirs under ``text_config``."""
    whole: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config: dict[str, Any] = whole.get("text_config", whole)
    return config


def full_plan(shape: ModelShape) -> Plan:
    """Everything that an engine of our own reads."""
    layers = candidate_layers(shape.layers)
    heads = tuple((layer, head) for layer in range(1, shape.layers + 1) for head in range(shape.heads))
    return Plan(layers, heads, evenly_spaced(layers, WINDOW_LAYERS), WINDOW_TOKENS)


def candidate_layers(count: int) -> tuple[int, ...]:
    """All block outputs, or as many evenly spaced ones as one request may read."""
    most = MAX_CAPTURES - 1 - WINDOW_LAYERS
    if count <= most:
        return tuple(range(1, count + 1))
    return tuple(sorted({round(1 + i * (count - 1) / (most - 1)) for i in range(most)}))


def evenly_spaced(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` of ``layers`` at most, ending with the last."""
    return tuple(dict.fromkeys(layers[round(len(layers) * i / count) - 1] for i in range(1, count + 1)))


def read_features(
    rows: Sequence[Row],
    store: FeatureStore,
    open_reader: Callable[[], Any],
    progress: Callable[[int], None] | None = None,
    extras: Sequence[Extra] = (),
) -> Features:
    """Read what is not kept yet, for ``extras`` in the same pass. ``open_reader()`` is a context manager of a
    ``Reader``, entered only if it is needed.

    Raises ``FeatureError`` for a row without complete readouts.
    """
    todo = [row for row in rows if _lacks(row, store, extras)]
    done = len(rows) - len(todo)
    if progress is not None:
        progress(done)
    if todo:
        with open_reader() as reader:
            for start in range(0, len(todo), ROWS_AT_ONCE):
                some = todo[start : start + ROWS_AT_ONCE]
                # Another run may have read some of them by now.
                _read_some([row for row in some if _lacks(row, store, extras)], store, reader, extras)
                done += len(some)
                if progress is not None:
                    progress(done)
    return stacked(rows, store)


def _lacks(row: Row, store: FeatureStore, extras: Sequence[Extra]) -> bool:
    """Whether anything is still to be read of it."""
    return not store.has(row.messages) or any(extra.lacks(row) for extra in extras)


def _read_some(rows: Sequence[Row], store: FeatureStore, reader: Reader, extras: Sequence[Extra]) -> None:
    unread = [not store.has(row.messages) for row in rows]
    lacking = [[extra for extra in extras if extra.lacks(row)] for row in rows]
    specs = [
        spec_of(
            row.messages,
            [
                *([plan_captures(store.plan, row.messages)] if is_unread else []),
                *(extra.captures for extra in its),
            ],
        )
        for row, is_unread, its in zip(rows, unread, lacking, strict=True)
    ]
    answer_tokens = max((extra.captures.answer_tokens for its in lacking for extra in its), default=0)
    found = reader.read([row.messages for row in rows], specs, answer_tokens)
    for row, is_unread, its, readouts in zip(rows, unread, lacking, found, strict=True):
        if is_unread:
            store.put(row.messages, reading_of(row, readouts, store.plan))
        for extra in its:
            extra.take(row, readouts)


def stacked(rows: Sequence[Row], store: FeatureStore) -> Features:
    """What is kept of all rows."""
    plan, readings = store.plan, []
    for row in rows:
        reading = store.get(row.messages)
        if reading is None:
            raise FeatureError(f"{row.named}: what was read of it cannot be found again; run the command once more")
        readings.append(reading)
    return Features(
        plan.layers,
        plan.heads,
        np.stack([reading.last for reading in readings]),
        np.stack([reading.mass for reading in readings]),
        plan.window_layers,
        np.stack([mean_of(reading) for reading in readings]),
        np.array([reading.tokens for reading in readings], np.float32),
    )


def mean_of(reading: Reading) -> FloatArray:
    """``[window layers, hidden_size]``: over all tokens of the data."""
    if reading.windows.size == 0:
        return np.zeros((0, reading.windows.shape[-1]), np.float32)
    shares = reading.window_tokens / reading.window_tokens.sum()
    return np.asarray(np.einsum("w,wlh->lh", shares, reading.windows), np.float32)


def reading_of(row: Row, readouts: Readouts, plan: Plan) -> Reading:
    last = [state_of(readouts, f"last{layer}", row.named, layer) for layer in plan.layers]
    states = [states_of(readouts, f"data{layer}", row.named, layer) for layer in plan.window_layers]
    if not states:
        nothing = np.zeros((0, 0, last[0].shape[-1]), np.float32)
        return Reading(np.stack(last), _mass(row, readouts, plan), nothing, np.zeros(0, np.float32))
    tokens = np.stack(states, axis=1)
    pieces = [tokens[at : at + plan.window_tokens] for at in range(0, len(tokens), plan.window_tokens)]
    return Reading(
        last=np.stack(last),
        mass=_mass(row, readouts, plan),
        windows=np.stack([piece.mean(axis=0) for piece in pieces]),
        window_tokens=np.array([len(piece) for piece in pieces], np.float32),
    )


def _mass(row: Row, readouts: Readouts, plan: Plan) -> FloatArray:
    if not has_instruction(row.messages):
        return np.full((len(plan.heads), 2), np.nan, np.float32)
    if not plan.heads:
        return np.zeros((0, 2), np.float32)
    attention = readouts.items.get("a")
    if not isinstance(attention, AttentionReadout) or attention.status != "complete":
        raise FeatureError(f"{row.named}: no attention readout: {reason_of(attention)}")
    return np.stack([attention.mass[INSTRUCTION], attention.mass[DATA]], axis=-1)
