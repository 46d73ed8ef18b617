"""Readouts survive the wire bit for bit, whatever their status."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from guard.mia.results import AttentionReadout, HiddenReadout, Readouts

finite32 = st.floats(width=32, allow_nan=False)


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=finite32), st.sampled_from(["complete", "dropped"]))
def test_readouts_survive_the_wire(values: np.ndarray, status: str) -> None:
    complete = status == "complete"
    sent = Readouts(
        items={
            "h": HiddenReadout(status, 3, 7, 11, values if complete else None, "" if complete else "no space"),
            "a": AttentionReadout(status, ((1, 2), (3, 4)), 7, {"data": values} if complete else {}, weights=values),
        },
        span_tokens={"data": ((1, 4), (6, 9))},
        prompt_tokens=8,
        prompt_index=1,
        choice_index=2,
    )
    got = Readouts.from_wire(json.loads(json.dumps(sent.to_wire())))
    assert got.span_tokens == sent.span_tokens
    assert (got.prompt_tokens, got.prompt_index, got.choice_index) == (8, 1, 2)
    hidden, attention = got.items["h"], got.items["a"]
    assert isinstance(hidden, HiddenReadout)
    assert isinstance(attention, AttentionReadout)
    assert (hidden.status, hidden.reason, hidden.token_id) == (status, sent.items["h"].reason, 11)
    assert attention.heads == ((1, 2), (3, 4))
    np.testing.assert_array_equal(attention.weights, values)
    if complete:
        np.testing.assert_array_equal(hidden.values, values)
        np.testing.assert_array_equal(attention.mass["data"], values)


@pytest.mark.parametrize(
    "item",
    [
        {"status": "fine", "kind": "hidden", "layer": 1, "position": 0, "token_id": 0},
        {"status": "complete", "kind": "smell", "position": 0},
        {
            "status": "complete",
            "kind": "hidden",
            "layer": 1,
            "position": 0,
            "token_id": 0,
            "values": {"dtype": "float16", "shape": [1], "data": ""},
        },
        {
            "status": "complete",
            "kind": "hidden",
            "layer": 1,
            "position": 0,
            "token_id": 0,
            "values": {"dtype": "float32", "shape": [9], "data": "AAAA"},
        },
    ],
)
def test_a_garbled_readout_is_an_error(item: dict) -> None:
    wire = Readouts(items={}).to_wire() | {"items": {"x": item}}
    with pytest.raises((KeyError, ValueError)):
        Readouts.from_wire(wire)
