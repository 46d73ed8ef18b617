"""States that the engine gave of one conversation, taken from its readouts or refused in the same words everywhere.

Owns these words, which name the row, the layer and the reason, never a text.
"""

from __future__ import annotations

from detectors.calibration.feature_store import FeatureError
from guard.mia.results import FloatArray, HiddenReadout, Readout, Readouts, RowsReadout


def state_of(readouts: Readouts, name: str, named: str, layer: int) -> FloatArray:
    """``[hidden_size]``, of one token. ``named``: the row, for messages. Raises ``FeatureError``."""
    one = readouts.items.get(name)
    if isinstance(one, HiddenReadout) and one.values is not None:
        return one.values
    raise FeatureError(f"{named}: no hidden state of layer {layer}: {reason_of(one)}")


def states_of(readouts: Readouts, name: str, named: str, layer: int, tokens: str = "the data") -> FloatArray:
    """``[tokens, hidden_size]``, at least one. ``tokens``: whose these are, for messages. Raises ``FeatureError``."""
    one = readouts.items.get(name)
    if isinstance(one, RowsReadout) and one.values is not None and one.positions:
        return one.values
    raise FeatureError(f"{named}: no hidden states of {tokens} at layer {layer}: {reason_of(one)}")


def reason_of(readout: Readout | None) -> str:
    """Why a readout has no values."""
    return "nothing came back" if readout is None else f"{readout.status} {readout.reason}".strip()
