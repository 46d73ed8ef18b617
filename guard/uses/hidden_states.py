"""Hidden states of chosen layers and tokens, whole or reduced, under MIA's names for the reductions.

Owns the reductions. Layers count as transformers' ``hidden_states`` do: 0 is the embedding, i the output of block i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from guard.mia.results import FloatArray, HiddenReadout, RowsReadout
from guard.mia.spec import HiddenCapture, MiaSpec, Positions, Span
from guard.uses.asking import Ask, Messages, Told
from guard.uses.parts import UnreadableError, naming, need_complete

Reduction = Literal["none", "mean", "norm"]

REDUCTIONS: Mapping[Reduction, Callable[[FloatArray], FloatArray]] = {
    "none": lambda states: states,
    "mean": lambda states: states.mean(axis=0) if len(states) else np.full(states.shape[1], np.nan, np.float32),
    "norm": lambda states: np.asarray(np.linalg.norm(states), np.float32),
}
"""The states ``[tokens, hidden_size]``; their mean over tokens ``[hidden_size]``; their length as one number, over all
tokens together. Without a token, as of an answer of one, the mean is NaN and the length 0."""


def extract(
    ask: Ask,
    conversations: Sequence[Messages],
    layers: Sequence[int],
    positions: Positions = "last_prompt",
    reduce: Reduction = "none",
    *,
    spans: Mapping[str, Span] | None = None,
    max_tokens: int = 1,
) -> list[dict[int, FloatArray]]:
    """Of each conversation, by layer. ``spans``: those that ``positions`` names. Answers are up to ``max_tokens`` long.

    Raises ``ValueError`` for an unknown reduction or without a layer, and ``UnreadableError``, which names the
    conversation by its number, when a state does not come back.
    """
    if not layers:
        raise ValueError("there is no layer to read")
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce is one of {', '.join(REDUCTIONS)}, not {reduce!r}")
    hidden = {_name(layer): HiddenCapture(layer=layer, positions=positions) for layer in layers}
    spec = MiaSpec(spans=dict(spans or {}), hidden=hidden)
    told = ask([(messages, spec) for messages in conversations], max_tokens)
    found = []
    for i, one in enumerate(told):
        with naming(f"conversation {i}"):
            found.append({layer: REDUCTIONS[reduce](states(one, layer)) for layer in layers})
    return found


def states(told: Told, layer: int) -> FloatArray:
    """``[tokens, hidden_size]``; no row where no token was read. Raises ``UnreadableError``."""
    name = _name(layer)
    item = told.items.get(name)
    need_complete(item, name)
    if not isinstance(item, HiddenReadout | RowsReadout) or item.values is None:
        raise UnreadableError(f"the readout {name!r} has no states")
    return np.atleast_2d(item.values)


def _name(layer: int) -> str:
    return f"layer{layer}"
