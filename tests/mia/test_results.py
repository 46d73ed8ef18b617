"""Readouts survive the wire bit for bit, whatever their status."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from guard.mia.results import (
    AttentionReadout,
    AttentionRowsReadout,
    HiddenMeanReadout,
    HiddenReadout,
    ProbeReadout,
    QKReadout,
    Readout,
    Readouts,
    RowsReadout,
    SteeringReport,
    join,
)

LAYER = {"kv_heads": {1: (0, 1)}, "group": {1: 2}, "scale": {1: 0.25}, "softcap": {1: 5.0}, "window": {1: None}}
finite32 = st.floats(width=32, allow_nan=False)
shapes = hnp.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=5)


@given(hnp.arrays(np.float32, shapes, elements=finite32), st.sampled_from(["complete", "dropped", "unavailable"]))
def test_readouts_survive_both_wires_bit_for_bit(array: np.ndarray, status: str) -> None:
    heads, where, ids = ((1, 2), (3, 4)), tuple(range(len(array))), (7,) * len(array)
    flat = array.reshape(len(array), array.shape[1] * array.shape[2])
    items = {
        "h": HiddenReadout(status, 3, 7, 11, array.ravel()),
        "none": HiddenReadout(status, 3, reason="no space"),
        "r": RowsReadout(status, 0, where, ids, flat),
        "mean": HiddenMeanReadout(status, 0, ((1, 4), (6, 9)), array.ravel()),
        "p": ProbeReadout(status, "risk", where, ids, flat),
        "a": AttentionReadout(status, heads, (7,), (1,), {"data": array.ravel()}, flat),
        "m": AttentionRowsReadout(status, heads, where, ids, {"data": flat}, array),
        "q": QKReadout(
            status,
            heads,
            where,
            ids,
            {1: array, 3: array},
            {1: array},
            {1: (0, 1)},
            {1: 2},
            {1: 0.25},
            {1: 5.0},
            {1: None},
        ),
    }
    report = SteeringReport(3, 0.5, 1, 9, "")
    sent = Readouts(items, {"data": ((1, 4), (6, 9))}, 8, 1, 2, "final", (report,))
    over_http = Readouts.from_wire(json.loads(json.dumps(sent.to_wire())))
    assert replace(over_http, items={}) == replace(sent, items={})
    for name, item in over_http.items.items():
        assert_same(item, items[name])


def assert_same(got: Readout, sent: Readout) -> None:
    assert type(got) is type(sent)
    for field in fields(sent):
        a, b = getattr(got, field.name), getattr(sent, field.name)
        if isinstance(b, dict) and b and isinstance(next(iter(b.values())), np.ndarray):
            assert a.keys() == b.keys()
            for key in b:
                np.testing.assert_array_equal(a[key], b[key])
        elif isinstance(b, np.ndarray):
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_rows_that_came_in_parts_are_joined_in_order(lengths: list[int]) -> None:
    ends = np.cumsum(lengths)
    parts, keys = [], []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        weights = np.arange((end - begin) * 2 * end, dtype=np.float32).reshape(end - begin, 2, end) + 1
        mass = {"s": np.full((end - begin, 2), end, np.float32)}
        parts.append(AttentionRowsReadout("complete", ((1, 0), (1, 1)), tuple(range(begin, end)), (), mass, weights))
        rows = np.arange(begin, end, dtype=np.float32)[:, None, None]
        keys.append(QKReadout("complete", ((1, 0),), tuple(range(begin, end)), (), {1: rows}, {1: rows}))
    whole = join(parts)
    assert whole.positions == tuple(range(ends[-1]))
    assert whole.weights.shape == (ends[-1], 2, ends[-1])
    for part in parts:
        rows = whole.weights[list(part.positions)]
        np.testing.assert_array_equal(rows[:, :, : part.weights.shape[2]], part.weights)
        assert not rows[:, :, part.weights.shape[2] :].any()
    np.testing.assert_array_equal(join(keys).keys[1][:, 0, 0], np.arange(ends[-1]))
    dropped = AttentionRowsReadout("dropped", ((1, 0), (1, 1)), reason="no space")
    assert join([*parts, dropped]) is dropped


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
