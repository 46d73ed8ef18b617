"""The model's states on conversations, read through the engine and kept, so that a stopped run goes on where it was.

Owns what is read: the residual stream after chosen layers, at the last token or over the last message. A kept file has
numbers and no text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from guard.mia.results import FloatArray, HiddenReadout, Readouts, RowsReadout
from guard.mia.spec import HiddenCapture, MiaSpec, SpanPositions
from guard.paths import cache_folder
from guard.writable import write_result

At = Literal["last", "mean"]
"""``last``: the prompt's last token, where the answer begins. ``mean``: over the tokens of the last message."""

SAID = "said"
CONVERSATIONS_AT_ONCE = 16
"""Between two times of keeping what was read: so much is lost at most when a run is stopped."""

Conversation = Sequence[Mapping[str, str]]


class StatesError(RuntimeError):
    """The engine gave no state for a conversation; the message has the layer and the reason, never the text."""


@dataclass(frozen=True)
class Reading:
    """What is read of every conversation. ``layers`` count as ``hidden_states`` of transformers do."""

    layers: tuple[int, ...]
    at: At

    @property
    def spec(self) -> MiaSpec:
        if self.at == "last":
            return MiaSpec(hidden={f"h{layer}": HiddenCapture(layer=layer) for layer in self.layers})
        over = SpanPositions(span=SAID)
        captures = {f"h{layer}": HiddenCapture(layer=layer, positions=over) for layer in self.layers}
        return MiaSpec(spans={SAID: ("message.-1",)}, hidden=captures)

    def states(self, readouts: Readouts) -> FloatArray:
        """``[layers, hidden_size]``. Raises ``StatesError``."""
        return np.stack([_state(readouts, layer) for layer in self.layers])


def _state(readouts: Readouts, layer: int) -> FloatArray:
    one = readouts.items[f"h{layer}"]
    if isinstance(one, HiddenReadout | RowsReadout) and one.values is not None and one.values.size:
        return one.values if one.values.ndim == 1 else one.values.mean(axis=0, dtype=np.float64).astype(np.float32)
    raise StatesError(f"no state after layer {layer}: {one.status} {one.reason}".strip())


@dataclass(frozen=True)
class StateStore:
    """States of one model, one small file a conversation, named by a hash of what it depends on."""

    model_sha256: str
    reading: Reading
    folder: Path

    def path(self, conversation: Conversation) -> Path:
        key = [self.model_sha256, self.reading.layers, self.reading.at, [dict(message) for message in conversation]]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return self.folder / name[:2] / f"{name[2:]}.safetensors"

    def get(self, conversation: Conversation) -> FloatArray | None:
        """None for what is not there; what cannot be read counts as not there, and is read again."""
        try:
            states: FloatArray = load(self.path(conversation).read_bytes())["states"]
        except (OSError, SafetensorError, KeyError):
            return None
        return states

    def put(self, conversation: Conversation, states: FloatArray) -> None:
        """Whole or not at all, so that a run may be killed at any time. Raises ``NotWritableError``."""
        write_result(self.path(conversation), save({"states": np.ascontiguousarray(states, np.float32)}))


def default_store(model_sha256: str, reading: Reading) -> StateStore:
    return StateStore(model_sha256, reading, cache_folder() / "states")


def read_states(
    conversations: Sequence[Conversation],
    store: StateStore,
    open_engine: Callable[[], AbstractContextManager[Any]],
    progress: Callable[[int], None] = lambda _: None,
) -> FloatArray:
    """``[conversations, layers, hidden_size]``. ``open_engine()`` gives a ``MiaLLM`` with taps for what is read; it is
    entered only when something is not kept yet. ``progress`` gets the number of conversations done. Raises
    ``StatesError``."""
    states = {i: kept for i, one in enumerate(conversations) if (kept := store.get(one)) is not None}
    todo = [i for i in range(len(conversations)) if i not in states]
    progress(len(states))
    if todo:
        with open_engine() as llm:
            for start in range(0, len(todo), CONVERSATIONS_AT_ONCE):
                some = todo[start : start + CONVERSATIONS_AT_ONCE]
                for i, own in zip(some, states_of(llm, [conversations[i] for i in some], store.reading), strict=True):
                    states[i] = own
                    store.put(conversations[i], own)
                progress(len(states))
    return np.stack([states[i] for i in range(len(conversations))])


def states_of(llm: Any, conversations: Sequence[Conversation], reading: Reading) -> FloatArray:
    """``[conversations, layers, hidden_size]``, read with a ``MiaLLM`` that has the taps. Raises ``StatesError``."""
    read: list[Readouts] = llm.read(conversations, reading.spec)
    return np.stack([reading.states(readouts) for readouts in read])
